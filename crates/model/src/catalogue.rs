//! stub
/// find
pub fn find(_name: &str) -> Result<crate::ModelSpec, Vec<String>> { Err(vec![]) }
