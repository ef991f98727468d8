//! Where in a file the operands of an operator lie, the pattern of an arm, the value of a field: what cargo-mutants'
//! list leaves out.

use std::collections::HashMap;
use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

pub type Bytes = Range<usize>;

/// What lies where, each by the byte that cargo-mutants says that its mutants begin at.
#[derive(Default)]
pub struct Syntax {
    pub binary: HashMap<usize, Binary>,
    pub unary: HashMap<usize, Unary>,
    pub arms: HashMap<usize, Arm>,
    pub fields: HashMap<usize, Field>,
}

pub struct Binary {
    pub whole: Bytes,
    pub left: Bytes,
    pub right: Bytes,
    /// A condition with `let`, which is no expression.
    pub has_let: bool,
}

pub struct Unary {
    pub whole: Bytes,
    pub operand: Bytes,
}

pub struct Arm {
    pub pattern_end: usize,
    pub guard: Option<Bytes>,
    /// Another arm takes whatever comes.
    pub dispensable: bool,
}

/// A field of an expression like `Settings { field: value, ..base }`.
pub struct Field {
    pub name: String,
    pub value: Bytes,
    /// Written `Settings { field, ..base }`.
    pub shorthand: bool,
    pub structure: Bytes,
    pub base: Bytes,
    /// The base is a place, whose field can be named, and not a value to be made.
    pub base_is_place: bool,
}

impl Syntax {
    pub fn of(text: &str) -> syn::Result<Self> {
        let mut syntax = Self::default();
        syntax.visit_file(&syn::parse_file(text)?);
        Ok(syntax)
    }
}

fn bytes(node: &impl Spanned) -> Bytes {
    node.span().byte_range()
}

fn has_let(condition: &syn::Expr) -> bool {
    match condition {
        syn::Expr::Let(_) => true,
        syn::Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

fn is_place(expression: &syn::Expr) -> bool {
    match expression {
        syn::Expr::Path(_) => true,
        syn::Expr::Field(field) => is_place(&field.base),
        syn::Expr::Unary(syn::ExprUnary { op: syn::UnOp::Deref(_), expr, .. }) => is_place(expr),
        syn::Expr::Paren(inner) => is_place(&inner.expr),
        _ => false,
    }
}

/// Whether an arm goes for every value. A name with a capital is a constant's or a variant's.
fn takes_all(arm: &syn::Arm) -> bool {
    let every = match &arm.pat {
        syn::Pat::Wild(_) => true,
        syn::Pat::Ident(name) => name.ident.to_string().starts_with(|first: char| !first.is_uppercase()),
        _ => false,
    };
    every && arm.guard.is_none()
}

impl<'ast> Visit<'ast> for Syntax {
    fn visit_expr_binary(&mut self, node: &'ast syn::ExprBinary) {
        let (left, right) = (bytes(&node.left), bytes(&node.right));
        let whole = left.start..right.end;
        let has_let = has_let(&node.left) || has_let(&node.right);
        self.binary.insert(bytes(&node.op).start, Binary { whole, left, right, has_let });
        visit::visit_expr_binary(self, node);
    }

    fn visit_expr_unary(&mut self, node: &'ast syn::ExprUnary) {
        self.unary.insert(bytes(node).start, Unary { whole: bytes(node), operand: bytes(&node.expr) });
        visit::visit_expr_unary(self, node);
    }

    fn visit_expr_match(&mut self, node: &'ast syn::ExprMatch) {
        let dispensable = node.arms.last().is_some_and(takes_all);
        for arm in &node.arms {
            let pattern = bytes(&arm.pat);
            let guard = arm.guard.as_ref().map(|(_, guard)| bytes(guard));
            self.arms.insert(pattern.start, Arm { pattern_end: pattern.end, guard, dispensable });
        }
        visit::visit_expr_match(self, node);
    }

    fn visit_expr_struct(&mut self, node: &'ast syn::ExprStruct) {
        if let Some(base) = &node.rest {
            for field in &node.fields {
                let syn::Member::Named(name) = &field.member else { continue };
                let found = Field {
                    name: name.to_string(),
                    value: bytes(&field.expr),
                    shorthand: field.colon_token.is_none(),
                    structure: bytes(&node.path),
                    base: bytes(base),
                    base_is_place: is_place(base),
                };
                self.fields.insert(bytes(field).start, found);
            }
        }
        visit::visit_expr_struct(self, node);
    }
}
