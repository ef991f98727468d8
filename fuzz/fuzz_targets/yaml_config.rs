//! A configuration in YAML: what is read can be written, in YAML and in JSON, and is then read as the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_plan::config::RawConfig;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(config) = RawConfig::from_slice(bytes, "fuzzed.yaml") {
        let _ = config.validate();
        for text in [config.to_yaml(), config.to_json()] {
            let text = text.expect("a configuration that can be written");
            let again = if text.trim() == "{}" { RawConfig::default() } else { read(&text) };
            assert_eq!(again, config, "{text}");
        }
    }
    if let Ok(assignment) = std::str::from_utf8(bytes) {
        let _ = RawConfig::default().apply_set(assignment);
    }
});

fn read(text: &str) -> RawConfig {
    RawConfig::from_str(text, "written.yaml").unwrap_or_else(|error| panic!("{error}\n{text}"))
}
