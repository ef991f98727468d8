//! Any text, any YAML and any configuration.

use proptest::prelude::*;

use super::*;
use crate::config::sample::{Sample, Source};

/// Texts that YAML writers and readers get wrong, and any others.
fn texts() -> impl Strategy<Value = Vec<String>> {
    let awkward = prop::sample::select(vec![
        "auto",
        "null",
        "~",
        "true",
        "no",
        "1",
        "0x10",
        "1e5",
        ".inf",
        "- a",
        "a: b",
        "#x",
        "a #b",
        " a ",
        "*.txt",
        "&a",
        "!t",
        "{a",
        "[a",
        "'",
        "\"",
        "\\",
        "a\nb",
        "a\n",
        "\ta",
        "---",
        "...",
        "<<",
        "=",
        "|",
        ">",
        "%",
        "@",
        "`",
        "é",
        "日本",
        "\u{feff}",
        "\u{85}",
        "\u{2028}",
        "\r",
        "\r\n",
        "\u{7f}",
        "byte-level",
        "12:30:45",
        "?",
        ":",
        "-",
    ]);
    let text = prop_oneof![
        awkward.prop_map(str::to_owned),
        "\\PC{1,24}",
        any::<String>()
            .prop_map(|text| text.replace('\0', "0"))
            .prop_filter("empty", |text| !text.is_empty()),
    ];
    prop::collection::vec(text, 4)
}

/// Any YAML of mappings, lists and scalars, half of its keys being ours.
fn documents() -> impl Strategy<Value = String> {
    let scalar = prop_oneof![
        prop::sample::select(vec![
            "1",
            "-1",
            "0.5",
            "1e400",
            ".nan",
            "auto",
            "true",
            "null",
            "24GiB",
            "full",
            "x",
            "''",
            "*a",
            "&a b",
            "!x 1",
            "18446744073709551615",
            "18446744073709551616",
            "\"\\u0000\"",
        ])
        .prop_map(str::to_owned),
        "[a-z0-9_.*&!'\"-]{0,6}",
    ];
    let known: Vec<String> = keys().iter().flat_map(|key| key.path.split('.')).map(str::to_owned).collect();
    let name = prop_oneof![prop::sample::select(known), "[a-z_.<]{0,5}"];
    scalar.prop_recursive(5, 40, 6, move |inner| {
        let entry = (name.clone(), inner.clone());
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(|items| format!("[{}]", items.join(", "))),
            prop::collection::vec(entry, 0..6).prop_map(|entries| {
                let entries: Vec<String> =
                    entries.iter().map(|(key, value)| format!("{key}: {value}")).collect();
                format!("{{{}}}", entries.join(", "))
            }),
        ]
    })
}

/// Loading, showing and validating must not panic, and what loads can be written and read again.
fn exercise(text: &str) {
    match RawConfig::from_str(text, "config.yaml") {
        Ok(config) => {
            let _ = config.validate().map_err(|e| e.to_string());
            let _ = (config.batch_settings(), config.training.length());
            if config != RawConfig::default() {
                assert_eq!(read(&config.to_yaml().unwrap()), config);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_configuration_reads_back_from_yaml_and_json(seed in any::<u64>(), texts in texts()) {
        let config = RawConfig::sample(&mut Source::new(seed, &texts));
        let yaml = config.to_yaml().unwrap();
        prop_assert_eq!(&read(&yaml), &config, "{}", yaml);
        prop_assert_eq!(&read(&config.to_json().unwrap()), &config);
        let _ = config.validate().map_err(|e| e.to_string());
    }

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,120}") {
        exercise(&text);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = RawConfig::from_slice(&bytes, "config.yaml").map_err(|e| e.to_string());
    }

    #[test]
    fn any_yaml_is_read_or_refused(text in documents()) {
        exercise(&text);
    }

    #[test]
    fn any_assignment_is_applied_or_refused(key in "[a-z_.]{0,12}", value in "\\PC{0,24}", text in documents()) {
        let mut config = RawConfig::default();
        for assignment in [format!("{key}={value}"), format!("training.{key}={value}"), format!("data.train={value}"), format!("memory={text}")] {
            let _ = config.apply_set(&assignment).map_err(|e| e.to_string());
        }
        let _ = config.validate().map_err(|e| e.to_string());
    }
}
