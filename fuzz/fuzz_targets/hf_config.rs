//! A `config.json`: what is read can be written, and is then read as the same.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use plimsoll_device::DType;
use plimsoll_model::hf_config::{config_json, parse_config};

fuzz_target!(|text: &str| {
    let parse = |text: &str| parse_config(Path::new("folder/config.json"), text, "fuzzed".to_owned());
    match parse(text) {
        Ok(spec) => {
            assert!(spec.parameter_count() > 0);
            let written = config_json(&spec, DType::Bf16).expect("a family that can be written");
            assert_eq!(parse(&written).expect("what was written"), spec, "{written}");
        }
        Err(error) => assert!(error.to_string().contains("folder/config.json"), "{error}"),
    }
});
