//! The text that mutants are woven into, and that a program with one switched on does what it does with the mutant alone.

use std::path::Path;
use std::process::Command;

use super::*;

/// Weaves mutants given as (genre, text that they stand at, replacement).
fn woven(text: &str, mutants: &[(Genre, &str, &str)]) -> String {
    let list: Vec<Mutant> =
        (1..).zip(mutants).map(|(id, (genre, at, to))| mutant(text, id, *genre, at, to)).collect();
    let list: Vec<&Mutant> = list.iter().collect();
    weave(text, &list, &HashSet::new()).unwrap().text.replace("crate::__mutants::", "")
}

fn mutant(text: &str, id: u32, genre: Genre, at: &str, to: &str) -> Mutant {
    let start = text.find(at).unwrap() + 1;
    let span = serde_json::json!({
        "start": { "line": 1, "column": start },
        "end": { "line": 1, "column": start + at.len() },
    });
    serde_json::from_value(serde_json::json!({
        "id": id, "name": "", "package": "", "file": "", "genre": format!("{genre:?}"), "replacement": to,
        "function": null, "span": span,
    }))
    .unwrap()
}

#[test]
fn operands_are_evaluated_once() {
    let text = woven(
        "fn f() -> u64 { a() * b() + 1 }",
        &[(Genre::BinaryOperator, "+", "-"), (Genre::BinaryOperator, "*", "/")],
    );
    assert_eq!(
        text,
        "fn f() -> u64 { (match ((match (a(), b()) { (__l, __r) => if on(2) { __l / __r } else { __l * __r } }), 1) \
         { (__l, __r) => if on(1) { __l - __r } else { __l + __r } }) }"
    );
}

#[test]
fn one_operator_has_several_mutants() {
    let text = woven(
        "fn f() -> bool { a < b }",
        &[(Genre::BinaryOperator, "<", ">"), (Genre::BinaryOperator, "<", "<=")],
    );
    assert_eq!(
        text,
        "fn f() -> bool { (match (&(a), &(b)) { (__l, __r) => either(*__l < *__r, [(1, *__l > *__r), \
         (2, *__l <= *__r)]) }) }"
    );
}

#[test]
fn the_right_of_a_lazy_operator_stays_lazy() {
    let and = woven("fn f() -> bool { a && b }", &[(Genre::BinaryOperator, "&&", "||")]);
    assert_eq!(and, "fn f() -> bool { ({ let __l: bool = a; if __l != on(1) { b } else { __l } }) }");
    let or = woven("fn f() -> bool { a || b }", &[(Genre::BinaryOperator, "||", "&&")]);
    assert_eq!(or, "fn f() -> bool { ({ let __l: bool = a; if __l == on(1) { b } else { __l } }) }");
}

#[test]
fn updates_take_place_where_they_are() {
    let text = woven("fn f() { s.n += g(1); }", &[(Genre::BinaryOperator, "+=", "-=")]);
    assert_eq!(text, "fn f() { (match (g(1)) { __r => if on(1) { s.n -= __r } else { s.n += __r } }); }");
}

#[test]
fn a_function_returns_another_value() {
    let text = woven("fn f() -> u64 { !a }", &[(Genre::FnValue, "!a", "0"), (Genre::UnaryOperator, "!", "")]);
    // The operator's own place is one byte; the function's is its body.
    assert_eq!(
        text,
        "fn f() -> u64 { if on(1) { return 0; } (match (a) { __v => if on(2) { __v } else { !__v } }) }"
    );
}

#[test]
fn arms_and_guards_go_by_guards() {
    let arm = woven("fn f() { match a { 1 => b(), _ => c() } }", &[(Genre::MatchArm, "1 => b()", "")]);
    assert_eq!(arm, "fn f() { match a { 1 if !on(1) => b(), _ => c() } }");
    let guards = woven(
        "fn f() { match a { n if n > 2 => b(), _ => c() } }",
        &[
            (Genre::MatchArmGuard, "n > 2", "true"),
            (Genre::MatchArmGuard, "n > 2", "false"),
            (Genre::MatchArm, "n if n", ""),
        ],
    );
    assert_eq!(
        guards,
        "fn f() { match a { n if !on(3) && (either(n > 2, [(1, true), (2, false)])) => b(), _ => c() } }"
    );
}

#[test]
fn a_field_comes_from_the_base() {
    let text = woven("fn f() -> S { S { a: 1, ..g() } }", &[(Genre::StructField, "a: 1", "")]);
    assert_eq!(
        text,
        "fn f() -> S { S { a: if on(1) { ({ let __base: S = g(); __base.a }) } else { 1 }, ..g() } }"
    );
    let text = woven("fn f() -> S { S { a, ..self.s } }", &[(Genre::StructField, "a,", "")]);
    assert_eq!(text, "fn f() -> S { S { a: if on(1) { (self.s).a } else { a }, ..self.s } }");
}

/// A program whose output shows each of its mutants. It stands in one line, as the mutants' columns do.
const PROGRAM: &str = "#[derive(Clone, Copy, Debug, Default)] struct Size { wide: u64, high: u64 } \
    fn area(s: Size) -> u64 { s.wide * s.high } \
    fn inside(n: i64) -> bool { n > 2 && n <= 7 } \
    fn edge(n: i64) -> bool { n == 2 || seen(n) < 1 } \
    fn seen(n: i64) -> i64 { print!(\"seen {n} \"); n - 8 } \
    fn name(n: i64) -> &'static str { match n { 0 => \"none\", k if k % 2 == 0 => \"even\", _ => \"other\" } } \
    fn total(all: &[f64]) -> f64 { let mut sum = 0.0; for &v in all { sum += 2.0 * -v; } sum } \
    fn grown(s: Size) -> Size { Size { high: s.high << 1, ..s } } \
    fn main() { for n in 0..10 { let outside = !inside(n); print!(\"{outside} {} {} {} \", edge(n), name(n), inside(n)); } \
    println!(\"{} {} {:?}\", area(Size { wide: 3, high: 5 }), total(&[1.0, 2.5]), grown(Size { wide: 1, high: 2 })); }";

const MUTANTS: [(Genre, &str, &str); 21] = [
    (Genre::FnValue, "s.wide * s.high", "1"),
    (Genre::BinaryOperator, "* s.high", "+"),
    (Genre::BinaryOperator, "* s.high", "/"),
    (Genre::BinaryOperator, "> 2", "=="),
    (Genre::BinaryOperator, "> 2", "<"),
    (Genre::BinaryOperator, "> 2", ">="),
    (Genre::BinaryOperator, "&& n", "||"),
    (Genre::BinaryOperator, "<= 7", ">"),
    (Genre::BinaryOperator, "== 2", "!="),
    (Genre::BinaryOperator, "|| seen", "&&"),
    (Genre::BinaryOperator, "< 1", "<="),
    (Genre::MatchArm, "0 => \"none\",", ""),
    (Genre::MatchArmGuard, "k % 2 == 0", "true"),
    (Genre::MatchArmGuard, "k % 2 == 0", "false"),
    (Genre::MatchArm, "k if k % 2 == 0 => \"even\",", ""),
    (Genre::BinaryOperator, "% 2", "/"),
    (Genre::BinaryOperator, "+= 2.0", "-="),
    (Genre::UnaryOperator, "-v", ""),
    (Genre::StructField, "high: s.high << 1,", ""),
    (Genre::BinaryOperator, "<< 1", ">>"),
    (Genre::UnaryOperator, "!inside(n);", ""),
];

#[test]
fn a_mutant_switched_on_does_what_it_does_alone() {
    let folder = std::env::temp_dir().join(format!("plimsoll-mutants-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let list: Vec<Mutant> =
        (1..).zip(MUTANTS).map(|(id, (genre, at, to))| sized(mutant(PROGRAM, id, genre, at, to))).collect();
    let woven = weave(PROGRAM, &list.iter().collect::<Vec<_>>(), &HashSet::new()).unwrap();
    assert!(woven.left_out.is_empty());
    let with_switch =
        format!("{}\nmod __mutants {{ {} }}", woven.text, include_str!("../switch.rs").replace("//!", "//"));
    let all = program(&folder, "all", &with_switch);
    let as_it_is = output(&program(&folder, "none", PROGRAM), 0);
    assert_eq!(output(&all, 0), as_it_is);
    for mutant in &list {
        let span = mutant.span.bytes(PROGRAM).unwrap();
        let alone = format!("{} {} {}", &PROGRAM[..span.start], mutant.replacement, &PROGRAM[span.end..]);
        let alone = output(&program(&folder, "alone", &alone), 0);
        assert_ne!(alone, as_it_is, "{} {}", mutant.id, mutant.replacement);
        assert_eq!(output(&all, mutant.id), alone, "{} {}", mutant.id, mutant.replacement);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// An operator's mutant spans the operator alone, whatever the text that it was found by.
fn sized(mutant: Mutant) -> Mutant {
    let span = mutant.span.bytes(PROGRAM).unwrap();
    let found = &PROGRAM[span.clone()];
    let length = match mutant.genre {
        Genre::BinaryOperator => found.find(' ').unwrap(),
        Genre::UnaryOperator => 1,
        _ => found.len(),
    };
    let (genre, to) = (mutant.genre, mutant.replacement.clone());
    let mut short = self::mutant(PROGRAM, mutant.id, genre, found, &to);
    short.span = serde_json::from_value(serde_json::json!({
        "start": { "line": 1, "column": span.start + 1 },
        "end": { "line": 1, "column": span.start + 1 + length },
    }))
    .unwrap();
    short
}

fn program(folder: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let (source, program) = (folder.join(format!("{name}.rs")), folder.join(name));
    std::fs::write(&source, text).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--edition=2024", "--cap-lints=allow", "-o"]).arg(&program).arg(&source);
    assert!(command.status().unwrap().success(), "{text}");
    program
}

fn output(program: &Path, mutant: u32) -> String {
    let output = Command::new(program).env("MUTANT", mutant.to_string()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}
