//! A template written anew with its operators as filters that count what they make (`metered::operator`).
//!
//! Jinja's own `+`, `*`, `~`, `[...]`, slices and comparisons cannot be watched, and texts between tags go past every
//! formatter. So the template is parsed, and printed with filters in their places and with its texts as expressions. Lines
//! stay where they were, for errors.

use std::fmt::Write;

use minijinja::machinery::ast::{self, BinOpKind, CallArg, CompareOpKind, Expr, Stmt, UnaryOpKind};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::metered::operator;

/// Words and signs of a tag; parsing needs some of the stack for each.
const LONGEST_TAG: usize = 4096;
/// `elif`s of a template; each is a condition within the one before.
const MOST_ELIFS: usize = 512;

/// The same template with everything in it counted.
pub fn rewrite(source: &str, name: &str, syntax: SyntaxConfig) -> Result<String, Error> {
    check(source, syntax.clone())?;
    let template = parse(source, name, syntax)?;
    let mut printer = Printer { out: String::with_capacity(2 * source.len()), line: 1 };
    printer.statement(&template)?;
    Ok(printer.out)
}

/// Refuses what would be parsed too deep.
fn check(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let (mut words, mut elifs) = (0, 0);
    // What is no token is an error of the parser, which knows its line.
    for token in tokenize(source, false, syntax).map_while(Result::ok) {
        match token.0 {
            Token::VariableStart | Token::BlockStart => words = 0,
            Token::Ident("elif") => elifs += 1,
            _ => words += 1,
        }
        if words > LONGEST_TAG || elifs > MOST_ELIFS {
            let reason = match elifs > MOST_ELIFS {
                true => format!("more than {MOST_ELIFS} times elif"),
                false => format!("line {}: a tag of more than {LONGEST_TAG} words", token.1.start_line),
            };
            return Err(Error::new(ErrorKind::SyntaxError, reason));
        }
    }
    Ok(())
}

struct Printer {
    out: String,
    line: u16,
}

impl Printer {
    fn put(&mut self, text: &str) {
        self.out.push_str(text);
    }

    /// Goes on in the line where something stood; only inside of tags.
    fn at(&mut self, span: Span) {
        while self.line < span.start_line {
            self.out.push('\n');
            self.line += 1;
        }
    }

    fn tag(&mut self, span: Span, words: &str) {
        self.put("{% ");
        self.at(span);
        self.put(words);
    }

    fn end(&mut self, word: &str) {
        self.put("{% end");
        self.put(word);
        self.put(" %}");
    }

    fn body(&mut self, body: &[Stmt<'_>]) -> Result<(), Error> {
        body.iter().try_for_each(|statement| self.statement(statement))
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::Template(template) => self.body(&template.children)?,
            Stmt::EmitExpr(emit) => {
                self.put("{{ ");
                self.at(emit.span());
                self.expression(&emit.expr)?;
                self.put(" }}");
            }
            Stmt::EmitRaw(emit) => {
                self.put("{{ ");
                self.at(emit.span());
                self.text(emit.raw);
                self.put(" }}");
            }
            Stmt::ForLoop(node) => {
                self.tag(node.span(), "for ");
                self.target(&node.target)?;
                self.put(" in ");
                self.expression(&node.iter)?;
                if let Some(condition) = &node.filter_expr {
                    self.put(" if ");
                    self.expression(condition)?;
                }
                self.put(if node.recursive { " recursive %}" } else { " %}" });
                self.body(&node.body)?;
                if !node.else_body.is_empty() {
                    self.put("{% else %}");
                    self.body(&node.else_body)?;
                }
                self.end("for");
            }
            Stmt::IfCond(node) => {
                self.tag(node.span(), "if ");
                self.condition(node)?;
                self.end("if");
            }
            Stmt::WithBlock(node) => {
                self.tag(node.span(), "with ");
                for (number, (target, value)) in node.assignments.iter().enumerate() {
                    self.put(if number > 0 { ", " } else { "" });
                    self.target(target)?;
                    self.put(" = ");
                    self.expression(value)?;
                }
                self.put(" %}");
                self.body(&node.body)?;
                self.end("with");
            }
            Stmt::Set(node) => {
                self.tag(node.span(), "set ");
                self.target(&node.target)?;
                self.put(" = ");
                match &node.target {
                    Expr::GetAttr(_) => self.filtered(&node.expr, operator::KEPT)?,
                    _ => self.expression(&node.expr)?,
                }
                self.put(" %}");
            }
            Stmt::SetBlock(node) => {
                self.tag(node.span(), "set ");
                self.target(&node.target)?;
                if let Some(filter) = &node.filter {
                    self.put(" | ");
                    self.chain(filter)?;
                }
                self.put(" %}");
                self.body(&node.body)?;
                self.end("set");
            }
            Stmt::AutoEscape(node) => {
                self.tag(node.span(), "autoescape ");
                self.expression(&node.enabled)?;
                self.put(" %}");
                self.body(&node.body)?;
                self.end("autoescape");
            }
            Stmt::FilterBlock(node) => {
                self.tag(node.span(), "filter ");
                self.chain(&node.filter)?;
                self.put(" %}");
                self.body(&node.body)?;
                self.end("filter");
            }
            Stmt::Block(node) => {
                self.tag(node.span(), "block ");
                self.put(node.name);
                self.put(if node.required { " required %}" } else { " %}" });
                if !node.required {
                    self.body(&node.body)?;
                }
                self.end("block");
            }
            Stmt::Import(node) => return Err(elsewhere(node.span())),
            Stmt::FromImport(node) => return Err(elsewhere(node.span())),
            Stmt::Extends(node) => return Err(elsewhere(node.span())),
            Stmt::Include(node) => return Err(elsewhere(node.span())),
            Stmt::Macro(node) => {
                self.tag(node.span(), "macro ");
                self.put(node.name);
                self.parameters(node)?;
                self.put(" %}");
                self.body(&node.body)?;
                self.end("macro");
            }
            Stmt::CallBlock(node) => {
                self.tag(node.span(), "call");
                self.parameters(&node.macro_decl)?;
                self.put(" ");
                self.call(&node.call)?;
                self.put(" %}");
                self.body(&node.macro_decl.body)?;
                self.end("call");
            }
            Stmt::Continue(node) => self.tag(node.span(), "continue %}"),
            Stmt::Break(node) => self.tag(node.span(), "break %}"),
            Stmt::Do(node) => {
                self.tag(node.span(), "do ");
                self.call(&node.call)?;
                self.put(" %}");
            }
        }
        Ok(())
    }

    /// A condition without its first word and its end.
    fn condition(&mut self, node: &ast::IfCond<'_>) -> Result<(), Error> {
        self.expression(&node.expr)?;
        self.put(" %}");
        self.body(&node.true_body)?;
        match node.false_body.as_slice() {
            [] => Ok(()),
            // As `elif`, so that a long row of them is no deep one.
            [Stmt::IfCond(next)] => {
                self.tag(next.span(), "elif ");
                self.condition(next)
            }
            body => {
                self.put("{% else %}");
                self.body(body)
            }
        }
    }

    /// What is assigned to.
    fn target(&mut self, target: &Expr<'_>) -> Result<(), Error> {
        match target {
            Expr::List(list) => {
                self.put("(");
                for item in &list.items {
                    self.target(item)?;
                    self.put(", ");
                }
                self.put(")");
                Ok(())
            }
            other => self.expression(other),
        }
    }

    /// The parameters of a macro; the last ones have defaults.
    fn parameters(&mut self, node: &ast::Macro<'_>) -> Result<(), Error> {
        self.put("(");
        let without = node.args.len().saturating_sub(node.defaults.len());
        for (number, arg) in node.args.iter().enumerate() {
            self.put(if number > 0 { ", " } else { "" });
            self.expression(arg)?;
            if let Some(default) = number.checked_sub(without).and_then(|n| node.defaults.get(n)) {
                self.put("=");
                self.expression(default)?;
            }
        }
        self.put(")");
        Ok(())
    }

    /// Filters without what they are applied to.
    fn chain(&mut self, filter: &Expr<'_>) -> Result<(), Error> {
        let Expr::Filter(filter) = filter else { return self.expression(filter) };
        if let Some(before) = &filter.expr {
            self.chain(before)?;
            self.put(" | ");
        }
        self.at(filter.span());
        self.name(filter.name);
        self.arguments(&filter.args)
    }

    /// A name, which may have white space around its dots.
    fn name(&mut self, name: &str) {
        self.out.extend(name.chars().filter(|c| !c.is_whitespace()));
    }

    fn filtered(&mut self, expression: &Expr<'_>, filter: &str) -> Result<(), Error> {
        self.put("(");
        self.expression(expression)?;
        self.put("|");
        self.put(filter);
        self.put(")");
        Ok(())
    }

    /// An operand that is compared or says where: constants are small.
    fn looked_at(&mut self, expression: &Expr<'_>, filter: &str) -> Result<(), Error> {
        match expression {
            Expr::Const(_) => self.expression(expression),
            _ => self.filtered(expression, filter),
        }
    }

    /// An expression, in brackets if it has several parts.
    fn expression(&mut self, expression: &Expr<'_>) -> Result<(), Error> {
        self.at(expression.span());
        match expression {
            Expr::Var(node) => self.put(node.id),
            Expr::Const(node) => self.constant(&node.value)?,
            Expr::Slice(node) => {
                self.put("(");
                self.looked_at(&node.expr, operator::INDEXED)?;
                self.put("[");
                for (number, part) in [&node.start, &node.stop, &node.step].into_iter().enumerate() {
                    self.put(if number > 0 { ":" } else { "" });
                    if let Some(part) = part {
                        self.expression(part)?;
                    }
                }
                self.put("]|");
                self.put(operator::MADE);
                self.put(")");
            }
            Expr::UnaryOp(node) => {
                self.put(match node.op {
                    UnaryOpKind::Not => "(not ",
                    UnaryOpKind::Neg => "(-",
                });
                self.expression(&node.expr)?;
                self.put(")");
            }
            Expr::BinOp(node) => self.binary(node)?,
            Expr::Compare(node) => {
                self.put("(");
                self.looked_at(&node.expr, operator::SEEN)?;
                for part in &node.ops {
                    self.put(compared_by(part.op));
                    self.looked_at(&part.expr, operator::SEEN)?;
                }
                self.put(")");
            }
            Expr::IfExpr(node) => {
                self.put("(");
                self.expression(&node.true_expr)?;
                self.put(" if ");
                self.expression(&node.test_expr)?;
                if let Some(other) = &node.false_expr {
                    self.put(" else ");
                    self.expression(other)?;
                }
                self.put(")");
            }
            Expr::Filter(node) => {
                self.put("(");
                self.filter(node)?;
                self.put(")");
            }
            Expr::Test(node) => {
                self.put("(");
                match node.args.is_empty() && !matches!(node.name, "upper" | "lower") {
                    true => self.expression(&node.expr)?,
                    false => self.looked_at(&node.expr, operator::SEEN)?,
                }
                self.put(" is ");
                self.name(node.name);
                self.arguments_with(&node.args, Some(operator::SEEN))?;
                self.put(")");
            }
            Expr::GetAttr(node) => {
                self.expression(&node.expr)?;
                self.put(".");
                self.put(node.name);
            }
            Expr::GetItem(node) => {
                let is_key =
                    matches!(&node.subscript_expr, Expr::Const(key) if key.value.kind() == ValueKind::String);
                match is_key {
                    true => self.expression(&node.expr)?,
                    false => self.looked_at(&node.expr, operator::INDEXED)?,
                }
                self.put("[");
                self.looked_at(&node.subscript_expr, operator::INDEXED)?;
                self.put("]");
            }
            Expr::Call(node) => self.call(node)?,
            Expr::List(node) => self.collection("[", &node.items, "]")?,
            Expr::Tuple(node) => self.collection("(", &node.items, ")")?,
            Expr::Map(node) => {
                self.put("({");
                for (key, value) in node.keys.iter().zip(&node.values) {
                    self.looked_at(key, operator::SEEN)?;
                    self.put(": ");
                    self.expression(value)?;
                    self.put(", ");
                }
                self.put("}|");
                self.put(operator::MADE);
                self.put(")");
            }
        }
        Ok(())
    }

    fn collection(&mut self, open: &str, items: &[Expr<'_>], close: &str) -> Result<(), Error> {
        self.put("(");
        self.put(open);
        for item in items {
            self.expression(item)?;
            self.put(", ");
        }
        self.put(close);
        self.put("|");
        self.put(operator::MADE);
        self.put(")");
        Ok(())
    }

    fn filter(&mut self, node: &ast::Filter<'_>) -> Result<(), Error> {
        match &node.expr {
            // A row of filters needs no brackets.
            Some(Expr::Filter(before)) => self.filter(before)?,
            Some(value) => self.expression(value)?,
            None => {}
        }
        self.put("|");
        self.name(node.name);
        self.arguments(&node.args)
    }

    /// An operator; a row of the same one has one pair of brackets.
    fn binary(&mut self, node: &ast::BinOp<'_>) -> Result<(), Error> {
        let (mut operands, mut first) = (vec![&node.right], &node.left);
        while let Expr::BinOp(inner) = first
            && same(inner.op, node.op)
            && !matches!(node.op, BinOpKind::Pow)
        {
            operands.push(&inner.right);
            first = &inner.left;
        }
        self.put("(");
        let filter = match node.op {
            BinOpKind::Add => Some(operator::ADD),
            BinOpKind::Mul => Some(operator::MULTIPLY),
            BinOpKind::Concat => Some(operator::CONCATENATE),
            _ => None,
        };
        if let Some(filter) = filter {
            self.expression(first)?;
            self.put("|");
            self.put(filter);
            self.put("(");
            for operand in operands.into_iter().rev() {
                self.expression(operand)?;
                self.put(", ");
            }
            self.put(")");
        } else {
            let (word, compares) = written(node.op);
            let operand = |printer: &mut Printer, operand: &Expr<'_>| match compares {
                true => printer.looked_at(operand, operator::SEEN),
                false => printer.expression(operand),
            };
            operand(self, first)?;
            for next in operands.into_iter().rev() {
                self.put(word);
                operand(self, next)?;
            }
        }
        self.put(")");
        Ok(())
    }

    fn call(&mut self, node: &ast::Call<'_>) -> Result<(), Error> {
        self.expression(&node.expr)?;
        // `loop.changed` compares.
        let compares = matches!(&node.expr, Expr::GetAttr(method) if method.name == "changed");
        self.put("(");
        self.listed(&node.args, compares.then_some(operator::SEEN))?;
        self.put(")");
        Ok(())
    }

    fn arguments(&mut self, args: &[CallArg<'_>]) -> Result<(), Error> {
        self.arguments_with(args, None)
    }

    fn arguments_with(&mut self, args: &[CallArg<'_>], filter: Option<&str>) -> Result<(), Error> {
        if !args.is_empty() {
            self.put("(");
            self.listed(args, filter)?;
            self.put(")");
        }
        Ok(())
    }

    fn listed(&mut self, args: &[CallArg<'_>], filter: Option<&str>) -> Result<(), Error> {
        for arg in args {
            let value = match arg {
                CallArg::Pos(value) => value,
                CallArg::Kwarg(name, value) => {
                    self.put(name);
                    self.put("=");
                    value
                }
                CallArg::PosSplat(values) => {
                    self.put("*");
                    self.looked_at(values, operator::SEEN)?;
                    self.put(", ");
                    continue;
                }
                CallArg::KwargSplat(values) => {
                    self.put("**");
                    self.looked_at(values, operator::SEEN)?;
                    self.put(", ");
                    continue;
                }
            };
            match filter {
                Some(filter) => self.looked_at(value, filter)?,
                None => self.expression(value)?,
            }
            self.put(", ");
        }
        Ok(())
    }

    fn constant(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::None => self.put("none"),
            ValueKind::Number if !value.is_integer() => {
                let number = f64::try_from(value.clone())?;
                // A number that is too large for its type reads as infinity.
                let text = if number.is_finite() { format!("{number:?}") } else { "1e999".to_owned() };
                self.put(&text);
            }
            // Writing to a text cannot fail.
            _ => drop(write!(self.out, "{value}")),
        }
        Ok(())
    }

    /// A text in quotes, on one line.
    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '\\' => self.put("\\\\"),
                '"' => self.put("\\\""),
                '\n' => self.put("\\n"),
                '\r' => self.put("\\r"),
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn elsewhere(span: Span) -> Error {
    let reason =
        format!("line {}: another template is wanted; a chat template is the only one", span.start_line);
    Error::new(ErrorKind::SyntaxError, reason)
}

fn same(one: BinOpKind, other: BinOpKind) -> bool {
    std::mem::discriminant(&one) == std::mem::discriminant(&other)
}

/// An operator as it is written, and whether it compares.
fn written(operator: BinOpKind) -> (&'static str, bool) {
    match operator {
        BinOpKind::Eq => (" == ", true),
        BinOpKind::Ne => (" != ", true),
        BinOpKind::Lt => (" < ", true),
        BinOpKind::Lte => (" <= ", true),
        BinOpKind::Gt => (" > ", true),
        BinOpKind::Gte => (" >= ", true),
        BinOpKind::In => (" in ", true),
        BinOpKind::ScAnd => (" and ", false),
        BinOpKind::ScOr => (" or ", false),
        BinOpKind::Add => (" + ", false),
        BinOpKind::Sub => (" - ", false),
        BinOpKind::Mul => (" * ", false),
        BinOpKind::Div => (" / ", false),
        BinOpKind::FloorDiv => (" // ", false),
        BinOpKind::Rem => (" % ", false),
        BinOpKind::Pow => (" ** ", false),
        BinOpKind::Concat => (" ~ ", false),
    }
}

fn compared_by(operator: CompareOpKind) -> &'static str {
    match operator {
        CompareOpKind::Eq => " == ",
        CompareOpKind::Ne => " != ",
        CompareOpKind::Lt => " < ",
        CompareOpKind::Lte => " <= ",
        CompareOpKind::Gt => " > ",
        CompareOpKind::Gte => " >= ",
        CompareOpKind::In => " in ",
        CompareOpKind::NotIn => " not in ",
    }
}
