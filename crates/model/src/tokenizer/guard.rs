//! Calls of the engine, which trusts its document: a panic in it becomes an error.
//!
//! A `tokenizer.json` from a stranger can hold numbers that the engine indexes with unchecked (the `stop` of a
//! `Strip` decoder beyond a token's end, say), and there is no way to ask it beforehand.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the engine answers, or why it could not, as text.
pub fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    // What a panic leaves half-changed inside the engine are caches behind locks, which it then reports as poisoned.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("the tokenizer contradicts itself ({})", message(&*panic))),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given")
}
