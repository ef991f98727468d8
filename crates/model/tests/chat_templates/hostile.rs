//! Templates from strangers.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, UndefinedBehavior};
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

/// Runs the body of a loop `times` times with a namespace `ns` whose `x` is `begin`.
fn repeated(begin: &str, times: u32, body: &str) -> String {
    format!("{{% set ns = namespace(x={begin}) %}}\n{{% for i in range({times}) %}}{body}{{% endfor %}}")
}

#[test]
fn little_does_not_become_much() {
    let long = "'a' * 30000000";
    let templates = [
        // Filters that fill up, repeat or copy.
        "{{ 'a'|indent(20000000000000) }}".to_owned(),
        "{{ 'a\\nb'|indent(width=20000000000000, first=true) }}".to_owned(),
        "{{ [1]|batch(1000000000000,'x')|list }}".to_owned(),
        "{{ [1]|slice(1000000000)|list|length }}".to_owned(),
        "{{ [1]|map('batch', 1000000000000, 'x')|list }}".to_owned(),
        "{{ ['a']|map('indent', 20000000000000)|list }}".to_owned(),
        "{{ '%1000000000d'|format(1) }}".to_owned(),
        "{{ '%*d'|format(1000000000, 1) }}".to_owned(),
        "{{ '{:1000000000}'.format(1) }}".to_owned(),
        "{{ '{:>{}}'.format(1, 1000000000) }}".to_owned(),
        format!("{{{{ ({long})|list|length }}}}"),
        format!("{{{{ ({long})|sort|length }}}}"),
        format!("{{{{ ({long})|replace('a', 'bbbb')|length }}}}"),
        format!("{{{{ ({long}).replace('', 'bbbb')|length }}}}"),
        format!("{{{{ ({long}).split('a')|length }}}}"),
        format!("{{{{ ({long}).join(range(1000)) }}}}"),
        format!("{{{{ range(1000)|join({long}) }}}}"),
        format!("{{{{ range(1000)|join(d={long}) }}}}"),
        format!("{{{{ ({long})|e|length }}}}"),
        // Operators.
        "{{ 'a' * 99000000 }}".to_owned(),
        "{{ 'a' * 99999999999 }}".to_owned(),
        "{{ ([1] * 99000000)|length }}".to_owned(),
        "{{ ((1, 2) * 99000000)|length }}".to_owned(),
        repeated("'a'", 60, "{% set ns.x = ns.x + ns.x %}"),
        repeated("'a'", 60, "{% set ns.x = ns.x ~ ns.x %}"),
        repeated("'a'", 60, "{% set ns.x = ns.x.replace('a', 'aa') %}"),
        repeated("'a'", 60, "{% set ns.x = ns.x|replace('a', 'aa') %}"),
        repeated("'a'", 60, "{% set ns.x = [ns.x, ns.x]|join %}"),
        repeated("'a'", 60, "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}"),
        repeated("'a'", 60, "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}"),
        repeated("'a'", 60, "{% set ns.x = [ns.x, ns.x]|tojson %}"),
        repeated("[1]", 60, "{% set ns.x = ns.x + ns.x %}"),
        repeated("[1]", 60, "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
        repeated("[1]", 60, "{% set ns.x = {'a': ns.x, 'b': ns.x} %}") + "{{ ns.x|tojson }}",
        repeated("[1]", 60, "{% set ns.x = ns.x|chain(ns.x) %}"),
        repeated("[1]", 60, "{% set ns.x = ns.x|zip(ns.x)|list %}"),
        repeated("[1]", 60, "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
        repeated("[1]", 60, "{% set ns.x = [ns.x, ns.x]|sum(start=[]) %}"),
        // What is captured.
        repeated("'a'", 60, "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        repeated("'a'", 60, "{% set y | upper %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}aaaaaaaa{% endmacro %}{% set x = f(25) %}"
            .to_owned(),
        format!("{{% set x %}}{{% for i in range(90000) %}}{}{{% endfor %}}{{% endset %}}", "a".repeat(5000)),
        format!("{{% macro f() %}}{}{{% endmacro %}}", "a".repeat(5000))
            + "{% for i in range(90000) %}{% set x = f() %}{% endfor %}",
        // What is written, and what is kept.
        "{% for i in range(90000) %}{% for j in range(90000) %}a{% endfor %}{% endfor %}".to_owned(),
        format!("{{% set x = {long} %}}{{% for i in range(90000) %}}{{{{ x }}}}{{% endfor %}}"),
        format!("{{% set x = {long} %}}{{% for i in range(90000) %}}{{{{ x[1:]|length }}}}{{% endfor %}}"),
        format!("{{% set x = {long} %}}") + &repeated("[]", 90000, "{% set ns.x = ns.x + [x|upper] %}"),
    ];
    for template in &templates {
        let error = render(template).expect_err(template);
        // Lists that hold themselves twice are looked at until that is too much.
        let bounded = matches!(error, ChatTemplateError::TooLarge { .. } | ChatTemplateError::TooLong { .. });
        assert!(bounded, "{template}: {error}");
        assert!(!error.to_string().contains("line 0"), "{template}: {error}");
    }
    let error = render("\n\n{{ 'a'|indent(20000000000000) }}").unwrap_err().to_string();
    assert!(error.contains("line 3: it makes more than 64."), "{error}");
}

#[test]
fn looking_at_much_comes_to_an_end() {
    for template in [
        repeated("'a' * 30000000", 90000, "{% if ns.x == ns.x ~ '' %}{% endif %}"),
        repeated("'a' * 30000000", 90000, "{% if ns.x is eq(ns.x) %}{% endif %}"),
        repeated("'a' * 30000000", 90000, "{% if 'b' in ns.x %}{% endif %}"),
        repeated("'a' * 30000000", 90000, "{% if ns.x[29999999] %}{% endif %}"),
        repeated("'a' * 30000000", 90000, "{% if ns.x.find('b') %}{% endif %}"),
        repeated("'a' * 30000000", 90000, "{% if ns.x is lower %}{% endif %}"),
        repeated("'a' * 30000000", 90000, "{% if loop.changed(ns.x) %}{% endif %}"),
    ] {
        let error = render(&template).unwrap_err();
        let ended = matches!(error, ChatTemplateError::TooLong { .. } | ChatTemplateError::TooLarge { .. });
        assert!(ended, "{template}: {error}");
    }
}

#[test]
fn nothing_is_so_deep_that_the_stack_ends() {
    for template in [
        repeated("1", 90000, "{% set ns.x = [ns.x] %}"),
        repeated("1", 90000, "{% set ns.x = {'a': ns.x} %}"),
        repeated("1", 90000, "{% set ns.x = (ns.x, 1) %}"),
        repeated("1", 90000, "{% set ns.x = dict(a=ns.x) %}"),
        repeated("[1]", 90000, "{% set ns.x = ns.x|batch(1)|list %}"),
        repeated("[1]", 90000, "{% set ns.x = ns.x|slice(1) %}"),
        repeated("1", 2, "{% set ns.x = ns %}{{ ns }}"),
        repeated("1", 2, "{% set ns.x = [ns] %}{{ ns }}"),
        repeated("1", 2, "{% set ns.x = {'a': ns} %}{{ ns|tojson }}"),
        repeated("1", 2, "{% set ns.x = namespace(y=ns) %}{{ ns }}"),
        format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000)),
        format!("{{{{ 1{} }}}}", " + 1".repeat(50000)),
        format!("{{{{ 1{} }}}}", "|e".repeat(50000)),
        format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(50000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(50000)),
    ] {
        assert!(render(&template).is_err(), "{template}");
    }
    // What has no more than usual of it is fine; sequences keep what they were given.
    let kept = repeated("[]", 500, "{% set ns.x = ns.x + [[i, {'a': [i]}]] %}") + "{{ ns.x|length }}";
    assert_eq!(render(&kept).unwrap().trim(), "500");
    let terms = format!("{{{{ 1{} }}}}", " + 1".repeat(1000));
    assert_eq!(render(&terms).unwrap(), "1001");
    let elifs = format!("{{% if 0 %}}{}{{% else %}}b{{% endif %}}", "{% elif 0 %}a".repeat(500));
    assert_eq!(render(&elifs).unwrap(), "b");
}

/// What Jinja makes of a template without any counting.
fn uncounted(source: &str) -> String {
    let mut jinja = Environment::new();
    jinja.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap());
    jinja.set_undefined_behavior(UndefinedBehavior::Lenient);
    jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    jinja
        .render_str(
            source,
            minijinja::context! { messages => Value::from(Serde([ChatMessage::new("user", "Hi")])) },
        )
        .unwrap()
}

#[test]
fn counting_changes_no_text() {
    for source in [
        "{{ 1 + 2 * 3 ** 2 - -4 // 2 % 5 }} {{ 2 ** 3 ** 2 }} {{ 7 - 2 - 1 }} {{ 8 / 4 / 2 }}",
        "{{ 1.5 + 2 }} {{ 2 * 1e3 }} {{ 'a' ~ 1 ~ none ~ true ~ [1, 'b'] }} {{ 0.1 + 0.2 }}",
        "{{ [1] + [2, 3] }} {{ (1, 2) + (3,) }} {{ 'ab' * 2 }} {{ [0] * 2 }} {{ 'a' + 'b' + 'c' }}",
        "{{ 1 < 2 < 3 }} {{ 3 in [1, 2] or 'a' in 'abc' and not false }} {{ 1 not in [1] }} {{ true and none }}",
        "{{ 'abcdef'[1:-1:2] }} {{ [1, 2, 3][::-1] }} {{ 'abc'[0] }} {{ [1, 2, 3][1:] | last }}",
        "{{ ' a\\n\\\\\"\\'b ' | trim | replace('a', \"'\") }}{{ 'it\\'s' }}",
        "{% set a, (b, c) = 1, (2, 3) %}{{ a }}{{ b }}{{ c }}{% set (d,) = [4] %}{{ d }}",
        "{% for k, v in {'x': 1, 'y': 2}.items() if v > 1 %}{{ k }}{{ loop.length }}{% else %}none{% endfor %}",
        "{% for x in [] %}a{% else %}b{% endfor %}{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}{{ m(*[4, 5]) }}",
        "{% macro m() %}[{{ caller(1) }}]{% endmacro %}{% call(x) m() %}{{ x }}!{% endcall %}",
        "{% filter upper | replace('A', 'b') %}a c{% endfilter %}{% set x | trim %} y {% endset %}{{ x }}",
        "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% raw %}{{ x }}{% endraw %}{% block t %}in{% endblock %}",
        "{{ 'a' if false }}|{{ nothing is defined }}|{{ [1, 2] | map('string') | join('-') }}|{{ nothing ~ 'x' }}",
        "{% if 1 == 2 %}a{% elif 2 is divisibleby(2) %}b{% else %}c{% endif %}{{ 5 is in([5]) }}{{ 'A' is upper }}",
        "a\n  {%- if true %}\n  b\n  {% endif %}\n{# c #}d\n",
        "{{ \"%s is %05.1f\" | format('x', 2) }} {{ '{:>4}'.format(7) }} {{ 'a,b'.split(',')[-1] }}",
        "{{ dict(a=1)['a'] }}{{ {'a': {'b': [1, 2]}}.a['b'][1] }}{{ messages[0].content[0] }}{{ messages[-1]['role'] }}",
        "{% set ns = namespace(n=0, l=[]) %}{% for i in range(5) %}{% if i == 3 %}{% continue %}{% endif %}{% set ns.n = ns.n + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.n }}{{ ns.l }}",
        "{{ [3, 1, 2] | sort | list }}{{ 'b a'.split() | sort(reverse=true) }}{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'gt', 1) | list | length }}",
        "{{ 'a\\nb' | indent(2) }}{{ 'a\\nb' | indent(width=3, first=true) }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ -3 | abs }}",
    ] {
        assert_eq!(render(source).unwrap(), uncounted(source), "{source}");
    }
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
