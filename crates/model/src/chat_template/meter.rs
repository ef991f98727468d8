//! What a template may make and do: a count of bytes and a count of work, for one text.
//!
//! Bytes that are made are never given back, so that the count bounds memory whatever the template keeps; work is what
//! instructions do beyond being counted one by one: looking at long texts and lists.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::{Object, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::error::TooLarge;

/// Bytes that any template may make, besides those that its input allows.
const MADE: u64 = 64 << 20;
/// Bytes that a template may make for a byte of its input: some write every message several times on the way.
const MADE_PER_INPUT: u64 = 64;
/// Bytes that any template may look at, besides those that its input allows.
const WORK: u64 = 256 << 20;
/// Bytes that a template may look at for a byte of its input.
const WORK_PER_INPUT: u64 = 256;
/// Bytes of an item of a list or a mapping.
pub const ITEM: u64 = 32;
/// Lists within lists; deeper ones would need more of the stack than there is.
const DEEPEST: usize = 64;
/// The meter's place among the variables: no template can write a name with a space.
const NAME: &str = "the meter";

/// The counts of one text.
#[derive(Debug)]
pub struct Meter {
    made: AtomicU64,
    most_made: u64,
    work: AtomicU64,
    most_work: u64,
}

impl Object for Meter {}

impl Meter {
    /// The variable that holds the counts of a text; `input` are the bytes of what it is made from.
    pub fn variable(input: u64) -> (&'static str, Value) {
        let most = |fixed: u64, each: u64| fixed.saturating_add(input.saturating_mul(each));
        let meter = Meter {
            made: AtomicU64::new(0),
            most_made: most(MADE, MADE_PER_INPUT),
            work: AtomicU64::new(0),
            most_work: most(WORK, WORK_PER_INPUT),
        };
        (NAME, Value::from_object(meter))
    }

    /// The counts of the text that is being made.
    pub fn of(state: &State) -> Result<Arc<Meter>, Error> {
        let meter = state.lookup(NAME).and_then(|value| value.downcast_object::<Meter>());
        meter.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the template is not being rendered"))
    }

    /// Counts bytes before they are made.
    pub fn make(&self, bytes: u64) -> Result<(), Error> {
        // One text is made by one thread; the counter is atomic because values may be shared.
        let made = self.made.load(Ordering::Relaxed).saturating_add(bytes);
        self.made.store(made, Ordering::Relaxed);
        if made > self.most_made { Err(self.too_large()) } else { Ok(()) }
    }

    /// Counts bytes that are looked at.
    pub fn work(&self, bytes: u64) -> Result<(), Error> {
        let work = self.work.load(Ordering::Relaxed).saturating_add(bytes);
        self.work.store(work, Ordering::Relaxed);
        if work > self.most_work { Err(ErrorKind::OutOfFuel.into()) } else { Ok(()) }
    }

    /// Counts `count` new items of lists.
    pub fn make_items(&self, count: usize) -> Result<(), Error> {
        self.make((count as u64).saturating_mul(ITEM))
    }

    fn too_large(&self) -> Error {
        Error::new(ErrorKind::InvalidOperation, "too large").with_source(TooLarge { limit: self.most_made })
    }

    /// Looks at a value with everything in it.
    pub fn look_at(&self, value: &Value) -> Result<(), Error> {
        self.walk(value, true, 0).map(drop)
    }

    /// Bytes that a copy of a value with everything in it takes, and how deep its lists are.
    pub fn size(&self, value: &Value) -> Result<Size, Error> {
        self.walk(value, true, 0)
    }

    /// Counts a value that an operator or a filter has made, and makes lists out of what only stands for them: what is
    /// made of what is made must not become a chain.
    pub fn made(&self, value: Value) -> Result<Value, Error> {
        match value.kind() {
            ValueKind::String => self.make(value.as_str().map_or(0, str::len) as u64)?,
            ValueKind::Seq | ValueKind::Map => {
                self.make_items(value.len().unwrap_or(0))?;
                self.walk(&value, false, 0)?;
            }
            ValueKind::Iterable => {
                let list = self.list(&value)?;
                self.walk(&list, false, 0)?;
                return Ok(list);
            }
            _ => {}
        }
        Ok(value)
    }

    /// The items of a value as a list of its own.
    pub fn list(&self, value: &Value) -> Result<Value, Error> {
        let mut items = Vec::new();
        self.extend(&mut items, value)?;
        Ok(Value::from(items))
    }

    /// Appends the items of a value.
    pub fn extend(&self, items: &mut Vec<Value>, value: &Value) -> Result<(), Error> {
        for item in value.try_iter()?.checked() {
            self.make(ITEM)?;
            items.push(item?);
        }
        Ok(())
    }

    /// Counts what a value takes when it is written, without writing it.
    pub fn measure(&self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.make(text.len() as u64),
            None => write!(Metered { meter: self, out: None }, "{value}").map_err(|_| self.too_large()),
        }
    }

    /// Writes a value at the end of a text.
    pub fn write(&self, out: &mut String, value: &Value) -> Result<(), Error> {
        write!(Metered { meter: self, out: Some(out) }, "{value}").map_err(|_| self.too_large())
    }

    /// Goes over a value and what is in it; the bytes of texts count where `texts` says so.
    fn walk(&self, value: &Value, texts: bool, depth: usize) -> Result<Size, Error> {
        if depth > DEEPEST {
            let reason = format!("lists within lists, more than {DEEPEST} deep");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        let text = value.as_str().filter(|_| texts).map_or(0, str::len) as u64;
        self.work(ITEM + text)?;
        let mut size = Size { items: 1, bytes: text, depth };
        let mut add = |item: &Value| -> Result<(), Error> {
            let inner = self.walk(item, texts, depth + 1)?;
            size.items += inner.items;
            size.bytes += inner.bytes;
            size.depth = size.depth.max(inner.depth);
            Ok(())
        };
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()?.checked() {
                    add(&item?)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()?.checked() {
                    let key = key?;
                    add(&value.get_item(&key)?)?;
                    add(&key)?;
                }
            }
            _ => {}
        }
        Ok(size)
    }
}

/// How large a value is with everything in it.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Values in it.
    pub items: u64,
    /// Bytes of its texts.
    pub bytes: u64,
    /// Lists within lists.
    pub depth: usize,
}

/// A text that is counted before it is written, or only counted.
struct Metered<'a> {
    meter: &'a Meter,
    out: Option<&'a mut String>,
}

impl Write for Metered<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.meter.make(text.len() as u64).map_err(|_| fmt::Error)?;
        if let Some(out) = &mut self.out {
            out.push_str(text);
        }
        Ok(())
    }
}
