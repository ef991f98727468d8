//! Templates from strangers.

use plimsoll_model::chat_template::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};
use proptest::prelude::*;
use serde_json::Map;

use crate::template;

fn render(source: &str) -> Result<String, ChatTemplateError> {
    ChatTemplate::new(source, Map::new(), "model")?
        .render(&[ChatMessage::new("user", "Hi")], &ChatOptions::default())
}

#[test]
fn wrong_syntax_is_named_by_line() {
    let error = render("a\nb\n{% if %}\n").unwrap_err();
    assert!(matches!(error, ChatTemplateError::Syntax { line: 3, .. }), "{error}");
    assert!(error.to_string().starts_with("model: chat template, line 3: syntax error"), "{error}");
    for source in
        ["{% for x in %}", "{{ ", "{% endgeneration %}", "{% generation %}", "{% if x %}", "{{ 'a }}"]
    {
        let error = render(source).unwrap_err();
        assert!(matches!(error, ChatTemplateError::Syntax { line: 1, .. }), "{error}");
    }
}

#[test]
fn wrong_use_is_named_by_line() {
    let check = |source: &str, line: usize, word: &str| {
        let error = render(source).unwrap_err();
        assert!(error.to_string().contains(&format!("line {line}")), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    check("\n{{ messages[0].nothing.at_all }}", 2, "undefined");
    check("\n\n{{ nothing() }}", 3, "nothing");
    check("{{ messages | unheard_of }}", 1, "unheard_of");
    check("{{ strftime_now('%Q') }}", 1, "%Q");
    check("{{ messages[0].content.unheard_of() }}", 1, "unheard_of");
    check("{{ messages | tojson(indent='x') }}", 1, "indent");
}

#[test]
fn no_files_are_read() {
    for source in
        ["{% include '/etc/hostname' %}", "{% import 'Cargo.toml' as x %}", "{% extends 'Cargo.toml' %}"]
    {
        assert!(render(source).is_err(), "{source}");
    }
}

#[test]
fn nothing_goes_on_for_ever() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops).unwrap_err(), ChatTemplateError::TooLong { line: 1, .. }));
    let calls = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}\n{{ f(0) }}";
    let error = render(calls).unwrap_err().to_string();
    assert!(error.contains("recursion"), "{error}");
    assert!(render("{% include 'chat_template' %}").is_err());
}

proptest! {
    #[test]
    fn any_text_is_a_template_or_refused(source in "[a-z{}%#'\"|.()\\-+ \n]{0,60}") {
        if let Err(error) = render(&source) {
            prop_assert!(error.to_string().starts_with("model: "), "{}", error);
        }
    }

    #[test]
    fn plain_text_is_itself(text in "[a-z%}# \n]{0,30}x") {
        prop_assert_eq!(template(&text).render(&[], &ChatOptions::default()).unwrap(), text);
    }
}
