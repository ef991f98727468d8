//! All mutants of a file in one text, each behind its switch.
//!
//! Operands are evaluated once, as before, and given to either operator; a function's other value is returned at its
//! beginning; an arm goes by a guard. No line is added, so that what the compiler says names the line of the source.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use crate::list::{Genre, Mutant};
use crate::syntax::{Bytes, Field, Syntax};

/// A file with its mutants.
pub struct Woven {
    pub text: String,
    /// What was written for the mutants, to know which one an error of the compiler is about.
    pub segments: Vec<Segment>,
    /// The mutants that have no such form, with the reason.
    pub left_out: Vec<(u32, LeftOut)>,
}

/// Why a mutant is not in the build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum LeftOut {
    /// Does not compile, by itself neither.
    Unviable,
    /// May compile by itself: `cargo mutants` has to try it.
    Alone,
}

pub struct Segment {
    pub bytes: Bytes,
    pub mutants: Vec<u32>,
    /// The text is the mutant's own, as it would be without the switch.
    pub own: bool,
}

/// A place of the file, with its mutants: number and replacement.
struct Edit {
    whole: Bytes,
    kind: Kind,
    mutants: Vec<(u32, String)>,
}

enum Kind {
    Function,
    Field { replaced: String, shorthand: Option<String> },
    Arm { guarded: bool },
    Guard,
    Binary { left: Bytes, operator: Bytes, right: Bytes },
    Unary { operator: String, operand: Bytes },
}

/// Weaves `mutants`, all of one file, into its text; without those in `left_out`.
pub fn weave(text: &str, mutants: &[&Mutant], left_out: &HashSet<u32>) -> syn::Result<Woven> {
    let syntax = Syntax::of(text)?;
    let mut places: BTreeMap<Place, Edit> = BTreeMap::new();
    let mut without = Vec::new();
    for mutant in mutants.iter().filter(|mutant| !left_out.contains(&mutant.id)) {
        match edit(text, &syntax, mutant) {
            Ok(new) => {
                let edit = places.entry(place(&new)).or_insert(new);
                edit.mutants.push((mutant.id, mutant.replacement.clone()));
            }
            Err(reason) => without.push((mutant.id, reason)),
        }
    }
    let edits: Vec<Edit> = places.into_values().collect();
    let marked = Weaver { text, edits: &edits }.range(0..text.len(), 0);
    let (text, segments) = unmark(&marked);
    Ok(Woven { text, segments, left_out: without })
}

/// Start, end and rank: what contains other edits comes before them.
type Place = (usize, Reverse<usize>, u8);

fn place(edit: &Edit) -> Place {
    let rank = match edit.kind {
        Kind::Function => 0,
        Kind::Field { .. } => 1,
        Kind::Arm { .. } => 2,
        Kind::Guard => 3,
        Kind::Binary { .. } => 4,
        Kind::Unary { .. } => 5,
    };
    (edit.whole.start, Reverse(edit.whole.end), rank)
}

fn edit(text: &str, syntax: &Syntax, mutant: &Mutant) -> Result<Edit, LeftOut> {
    let span = mutant.span.bytes(text).ok_or(LeftOut::Alone)?;
    let (whole, kind) = match mutant.genre {
        Genre::FnValue if mutant.returns_opaque() => return Err(LeftOut::Alone),
        Genre::FnValue => (span, Kind::Function),
        Genre::MatchArmGuard => (span, Kind::Guard),
        Genre::MatchArm => {
            let arm = syntax.arms.get(&span.start).filter(|arm| arm.dispensable).ok_or(LeftOut::Alone)?;
            let guarded = arm.guard.is_some();
            (arm.guard.clone().unwrap_or(arm.pattern_end..arm.pattern_end), Kind::Arm { guarded })
        }
        Genre::BinaryOperator => {
            let found = syntax.binary.get(&span.start).ok_or(LeftOut::Alone)?;
            let lazy = |operator: &str| ["&&", "||"].contains(&operator);
            if found.has_let {
                // A condition with `let` knows `&&` alone.
                return Err(LeftOut::Unviable);
            }
            if lazy(&text[span.clone()]) != lazy(&mutant.replacement) {
                return Err(LeftOut::Alone);
            }
            let (left, right) = (found.left.clone(), found.right.clone());
            (found.whole.clone(), Kind::Binary { left, operator: span, right })
        }
        Genre::UnaryOperator if mutant.replacement.is_empty() => {
            let found = syntax.unary.get(&span.start).ok_or(LeftOut::Alone)?;
            let operator = text[span].to_owned();
            (found.whole.clone(), Kind::Unary { operator, operand: found.operand.clone() })
        }
        Genre::StructField => {
            let field = syntax.fields.get(&span.start).ok_or(LeftOut::Alone)?;
            let shorthand = field.shorthand.then(|| field.name.clone());
            (field.value.clone(), Kind::Field { replaced: of_base(text, field), shorthand })
        }
        Genre::UnaryOperator | Genre::Other => return Err(LeftOut::Alone),
    };
    Ok(Edit { whole, kind, mutants: Vec::new() })
}

/// The value that a field has if it is left out.
fn of_base(text: &str, field: &Field) -> String {
    let base = one_line(&text[field.base.clone()]);
    let name = &field.name;
    if field.base_is_place {
        return format!("({base}).{name}");
    }
    let structure = &text[field.structure.clone()];
    format!("({{ let __base: {structure} = {base}; __base.{name} }})")
}

/// What is written twice must not add lines. A comment at the end of a line would then reach too far: such places do
/// not compile, and are left out.
fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

const OWN: char = '\u{E000}';
const SHARED: char = '\u{E001}';
const BEGIN: char = '\u{E002}';
const END: char = '\u{E003}';

fn own(mutant: u32, text: &str) -> String {
    format!("{OWN}{mutant}{BEGIN}{text}{END}")
}

struct Weaver<'t> {
    text: &'t str,
    edits: &'t [Edit],
}

impl Weaver<'_> {
    /// The text of `range`, with those edits in it that are not before `first`.
    fn range(&self, range: Bytes, first: usize) -> String {
        let mut out = String::new();
        let mut at = range.start;
        for (index, edit) in self.edits.iter().enumerate().skip(first) {
            if edit.whole.start >= at && edit.whole.end <= range.end {
                out += &self.text[at..edit.whole.start];
                let mutants: Vec<String> = edit.mutants.iter().map(|(id, _)| id.to_string()).collect();
                out += &format!("{SHARED}{}{BEGIN}{}{END}", mutants.join(","), self.edit(edit, index + 1));
                at = edit.whole.end;
            }
        }
        out + &self.text[at..range.end]
    }

    /// A condition, and what its mutants make of it: none of them has an effect, so that all can be evaluated.
    fn either(&self, edit: &Edit, as_it_is: &str, form: impl Fn(&str) -> String) -> String {
        let of_mutant = |(id, value): &(u32, String)| format!("({id}, {})", own(*id, &form(value)));
        let mutants: Vec<String> = edit.mutants.iter().map(of_mutant).collect();
        format!("crate::__mutants::either({as_it_is}, [{}])", mutants.join(", "))
    }

    fn edit(&self, edit: &Edit, inner: usize) -> String {
        let whole = || self.range(edit.whole.clone(), inner);
        let on = |id: &u32| format!("crate::__mutants::on({id})");
        let chain = |form: &dyn Fn(&str) -> String, as_it_is: &str| {
            let mut arms = String::new();
            for (id, replacement) in &edit.mutants {
                arms += &format!("if {} {{ {} }} else ", on(id), own(*id, &form(replacement)));
            }
            arms + &format!("{{ {} }}", form(as_it_is))
        };
        match &edit.kind {
            Kind::Function => {
                let mut out = String::new();
                for (id, value) in &edit.mutants {
                    let value = if value == "()" { "return;".into() } else { format!("return {value};") };
                    out += &format!("if {} {{ {} }} ", on(id), own(*id, &value));
                }
                out + &whole()
            }
            Kind::Field { replaced, shorthand } => {
                let name = shorthand.as_ref().map(|name| format!("{name}: ")).unwrap_or_default();
                let [(id, _), ..] = &edit.mutants[..] else { return whole() };
                format!("{name}if {} {{ {} }} else {{ {} }}", on(id), own(*id, replaced), whole())
            }
            Kind::Arm { guarded } => {
                let [(id, _), ..] = &edit.mutants[..] else { return whole() };
                if *guarded { format!("!{} && ({})", on(id), whole()) } else { format!(" if !{}", on(id)) }
            }
            Kind::Guard => self.either(edit, &whole(), |value| value.to_owned()),
            Kind::Binary { left, operator, right } => {
                let (left, right) = (self.range(left.clone(), inner), self.range(right.clone(), inner));
                let operator = &self.text[operator.clone()];
                match operator {
                    "&&" | "||" => {
                        let [(id, _), ..] = &edit.mutants[..] else { return whole() };
                        let differs = if operator == "&&" { "!=" } else { "==" };
                        let condition = format!("__l {differs} {}", on(id));
                        format!("({{ let __l: bool = {left}; if {condition} {{ {right} }} else {{ __l }} }})")
                    }
                    "==" | "!=" | "<" | ">" | "<=" | ">=" => {
                        let form = |operator: &str| format!("*__l {operator} *__r");
                        let value = self.either(edit, &form(operator), form);
                        format!("(match (&({left}), &({right})) {{ (__l, __r) => {value} }})")
                    }
                    _ if operator.ends_with('=') => {
                        let place = one_line(&left);
                        let arms = chain(&|operator| format!("{place} {operator} __r"), operator);
                        format!("(match ({right}) {{ __r => {arms} }})")
                    }
                    _ => {
                        let arms = chain(&|operator| format!("__l {operator} __r"), operator);
                        format!("(match ({left}, {right}) {{ (__l, __r) => {arms} }})")
                    }
                }
            }
            Kind::Unary { operator, operand } => {
                let operand = self.range(operand.clone(), inner);
                let arms = chain(&|_| "__v".into(), "");
                let arms = arms.trim_end_matches("{ __v }");
                format!("(match ({operand}) {{ __v => {arms}{{ {operator}__v }} }})")
            }
        }
    }
}

/// Takes the marks out of a text, and says where they were.
fn unmark(marked: &str) -> (String, Vec<Segment>) {
    let (mut text, mut segments, mut open) = (String::new(), Vec::new(), Vec::new());
    let mut characters = marked.chars();
    while let Some(character) = characters.next() {
        match character {
            OWN | SHARED => {
                let ids: String = characters.by_ref().take_while(|&c| c != BEGIN).collect();
                let mutants = ids.split(',').filter_map(|id| id.parse().ok()).collect();
                open.push(Segment { bytes: text.len()..0, mutants, own: character == OWN });
            }
            END => {
                if let Some(mut segment) = open.pop() {
                    segment.bytes.end = text.len();
                    segments.push(segment);
                }
            }
            _ => text.push(character),
        }
    }
    (text, segments)
}

#[cfg(test)]
mod tests;
