//! Tests of the configuration as a user meets it: text in, values or messages out.

mod overriding;
mod properties;
mod reading;
mod refusing;

use super::*;

fn read(text: &str) -> RawConfig {
    RawConfig::from_str(text, "config.yaml").unwrap_or_else(|e| panic!("{e}"))
}

/// What loading and validating a text says.
fn message(text: &str) -> String {
    match RawConfig::from_str(text, "config.yaml").and_then(|config| config.validate()) {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn check(text: &str, expected: &str) {
    assert_eq!(message(text), expected, "\n{text}");
}

/// The first line of the message alone.
#[track_caller]
fn check_line(text: &str, expected: &str) {
    let message = message(text);
    assert_eq!(message.lines().next(), Some(expected), "\n{text}");
}
