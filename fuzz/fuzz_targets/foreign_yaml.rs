//! A configuration of another program: what is understood of it can be applied or is refused, and what is left has a place.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_plan::config::{Imported, Override, RawConfig};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(Some(imported)) = Imported::text_as_ours(text, "fuzzed.yaml") else { return };
    assert!(imported.left.iter().all(|left| left.contains("fuzzed.yaml") || left.contains("Ava by itself")));
    let mut config = RawConfig::default();
    let applied = imported
        .overrides
        .iter()
        .try_for_each(|Override { key, value, argument }| config.apply_override(key, value, argument));
    if applied.is_ok() && config.validate().is_ok() {
        let text = config.to_yaml().expect("a configuration that can be written");
        assert_eq!(RawConfig::from_str(&text, "written.yaml").expect("one that can be read"), config);
    }
});
