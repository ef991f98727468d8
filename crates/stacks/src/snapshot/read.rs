//! The pickle's machine: a stack of values, a memo, and containers, of which dictionaries become records as soon as they are whole. So a
//! trace of millions of entries takes some 60 bytes for each, whatever its pickle takes.

use std::collections::HashMap;
use std::io::Read;

use super::pickle::{Bytes, PickleError, Problem, decimal, little_endian, raw_unicode};
use super::records::{Entry, Frame, Interned, ReadBlock, ReadSegment, ReadState, Snapshot, StackId};
use super::values::{Content, Kind, Nodes, Value};
use crate::allocator::Action;

/// What reading may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory, about.
    pub memory: u64,
}

impl Default for Limits {
    /// 4 GiB: enough for a file of 10 GB.
    fn default() -> Self {
        Limits { memory: 4 << 30 }
    }
}

/// A longer string has no meaning for a snapshot and is passed over.
const LONGEST_STRING: u64 = 1 << 16;

/// The words that mean something. Their ids are their places.
const WORDS: [&str; 36] = [
    "action",
    "addr",
    "size",
    "stream",
    "time_us",
    "frames",
    "device_free",
    "name",
    "filename",
    "line",
    "state",
    "requested_size",
    "history",
    "real_size",
    "address",
    "blocks",
    "total_size",
    "device",
    "segment_type",
    "is_expandable",
    "segments",
    "device_traces",
    "large",
    "small",
    "active_allocated",
    "active_pending_free",
    "active_awaiting_free",
    "inactive",
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
];

/// The values of a dictionary's keys that mean something.
#[derive(Default)]
struct Fields {
    action: Option<Value>,
    addr: Option<Value>,
    size: Option<Value>,
    stream: Option<Value>,
    time_us: Option<Value>,
    frames: Option<Value>,
    device_free: Option<Value>,
    name: Option<Value>,
    filename: Option<Value>,
    line: Option<Value>,
    state: Option<Value>,
    requested_size: Option<Value>,
    history: Option<Value>,
    real_size: Option<Value>,
    address: Option<Value>,
    blocks: Option<Value>,
    total_size: Option<Value>,
    device: Option<Value>,
    segment_type: Option<Value>,
    is_expandable: Option<Value>,
}

impl Fields {
    fn of(pairs: &[(Value, Value)]) -> Fields {
        let mut fields = Fields::default();
        for (key, value) in pairs {
            let field = match word(*key) {
                "action" => &mut fields.action,
                "addr" => &mut fields.addr,
                "size" => &mut fields.size,
                "stream" => &mut fields.stream,
                "time_us" => &mut fields.time_us,
                "frames" => &mut fields.frames,
                "device_free" => &mut fields.device_free,
                "name" => &mut fields.name,
                "filename" => &mut fields.filename,
                "line" => &mut fields.line,
                "state" => &mut fields.state,
                "requested_size" => &mut fields.requested_size,
                "history" => &mut fields.history,
                "real_size" => &mut fields.real_size,
                "address" => &mut fields.address,
                "blocks" => &mut fields.blocks,
                "total_size" => &mut fields.total_size,
                "device" => &mut fields.device,
                "segment_type" => &mut fields.segment_type,
                "is_expandable" => &mut fields.is_expandable,
                _ => continue,
            };
            *field = Some(*value);
        }
        fields
    }
}

/// The word that a string is; empty for any other value.
fn word(value: Value) -> &'static str {
    match value.kind() {
        Kind::Str(id) => WORDS.get(id as usize).copied().unwrap_or_default(),
        _ => "",
    }
}

fn int(field: Option<Value>) -> Option<u64> {
    field.and_then(Value::int)
}

/// A number of bytes, where there is one.
fn size(field: Option<Value>) -> Result<Option<u64>, Problem> {
    match field.map(Value::kind) {
        None => Ok(None),
        Some(Kind::Int(bytes)) if bytes >= 0 => Ok(Some(bytes.cast_unsigned())),
        Some(_) => Err(Problem::Type("a size is negative, is beyond 2^59 bytes or is no number")),
    }
}

fn action(value: Value) -> Option<Action> {
    Some(match word(value) {
        "alloc" => Action::Alloc,
        "free_requested" => Action::FreeRequested,
        "free_completed" => Action::FreeCompleted,
        "segment_alloc" => Action::SegmentAlloc,
        "segment_free" => Action::SegmentFree,
        "segment_map" => Action::SegmentMap,
        "segment_unmap" => Action::SegmentUnmap,
        "oom" => Action::OutOfMemory,
        _ => return None,
    })
}

fn state(value: Value) -> ReadState {
    match word(value) {
        "active_allocated" => ReadState::Allocated,
        "active_pending_free" | "active_awaiting_free" => ReadState::Pending,
        _ => ReadState::Inactive,
    }
}

/// Reads the snapshot that `source`, a file of `length` bytes, holds.
///
/// # Errors
/// For a pickle that is damaged, hostile, or of something else, with the offset.
pub fn read_snapshot(source: impl Read, length: u64, limits: Limits) -> Result<Snapshot, PickleError> {
    let mut machine = Machine::new(Bytes::new(source, length), limits);
    loop {
        let offset = machine.bytes.offset();
        let at = |problem| PickleError { offset, problem };
        if let Some(root) = machine.step().map_err(at)? {
            let (devices, segments) = machine.root(root).map_err(at)?;
            return Ok(machine.snapshot(devices, segments, length));
        }
    }
}

struct Machine<R> {
    bytes: Bytes<R>,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Value>,
    nodes: Nodes,
    left: u64,
    limits: Limits,
    strings: Interned<str>,
    frames: Interned<[u32]>,
    stacks: Interned<[u32]>,
    streams: HashMap<u64, u16>,
    entries: Vec<Entry>,
    blocks: Vec<ReadBlock>,
    segments: Vec<ReadSegment>,
    histories: Vec<(u64, StackId)>,
}

impl<R: Read> Machine<R> {
    fn new(bytes: Bytes<R>, limits: Limits) -> Self {
        let mut strings = Interned::<str>::new();
        for word in WORDS {
            strings.insert(word.into());
        }
        let mut stacks = Interned::<[u32]>::new();
        stacks.insert(Box::new([]));
        Machine {
            bytes,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            nodes: Nodes::default(),
            left: limits.memory,
            limits,
            strings,
            frames: Interned::new(),
            stacks,
            streams: HashMap::new(),
            entries: Vec::new(),
            blocks: Vec::new(),
            segments: Vec::new(),
            histories: Vec::new(),
        }
    }

    fn spend(&mut self, bytes: u64) -> Result<(), Problem> {
        self.left = self.left.checked_sub(bytes).ok_or(Problem::TooLarge(self.limits.memory))?;
        Ok(())
    }

    fn push(&mut self, value: Value) -> Result<(), Problem> {
        if self.stack.len() == self.stack.capacity() {
            self.spend(8 * self.stack.len().max(64) as u64)?;
        }
        self.stack.push(value);
        Ok(())
    }

    fn push_int(&mut self, number: i64) -> Result<(), Problem> {
        self.push(Value::of(Kind::Int(number)))
    }

    fn pop(&mut self) -> Result<Value, Problem> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(Problem::Underflow);
        }
        self.stack.pop().ok_or(Problem::Underflow)
    }

    fn top(&self) -> Result<Value, Problem> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.last().copied().filter(|_| self.stack.len() > floor).ok_or(Problem::Underflow)
    }

    /// Everything above the last mark.
    fn above_mark(&mut self) -> Result<Vec<Value>, Problem> {
        let mark = self.marks.pop().ok_or(Problem::Underflow)?;
        Ok(self.stack.drain(mark..).collect())
    }

    fn push_node(&mut self, content: Content) -> Result<(), Problem> {
        self.spend(48)?;
        let value = self.nodes.insert(content);
        self.push(value)
    }

    /// Carries out an opcode. Gives the root at the end.
    fn step(&mut self) -> Result<Option<Value>, Problem> {
        let opcode = self.bytes.byte()?;
        match opcode {
            0x80 => match self.bytes.byte()? {
                0..=5 => {}
                newer => return Err(Problem::Protocol(newer)),
            },
            0x95 => {
                self.bytes.array::<8>()?;
            }
            b'.' => return self.pop().map(Some),
            b'(' => {
                self.spend(if self.marks.len() == self.marks.capacity() {
                    8 * self.marks.len() as u64
                } else {
                    0
                })?;
                self.marks.push(self.stack.len());
            }
            b'0' => match self.marks.last() {
                Some(&mark) if mark == self.stack.len() => {
                    self.marks.pop();
                }
                _ => {
                    self.pop()?;
                }
            },
            b'1' => {
                self.above_mark()?;
            }
            b'2' => {
                let top = self.top()?;
                self.nodes.share(top);
                self.push(top)?;
            }
            b'N' | 0x88 | 0x89 => self.constant(opcode)?,
            b'I' | b'L' | b'K' | b'M' | b'J' | 0x8a | 0x8b => self.integer(opcode)?,
            b'F' => {
                self.bytes.line()?;
                self.push(Value::OPAQUE)?;
            }
            b'G' => {
                self.bytes.array::<8>()?;
                self.push(Value::OPAQUE)?;
            }
            b'S' | b'V' | b'T' | b'U' | b'X' | 0x8c | 0x8d | b'B' | b'C' | 0x8e | 0x96 => {
                self.string(opcode)?
            }
            b']' | b')' | 0x8f => self.push_node(Content::List(Vec::new()))?,
            b'}' => self.push_node(Content::Dict(Vec::new()))?,
            b'l' | b't' | 0x91 => {
                let items = self.above_mark()?;
                self.list_of(items)?;
            }
            0x85..=0x87 => {
                let mut items = Vec::new();
                for _ in 0x85..=opcode {
                    items.insert(0, self.pop()?);
                }
                self.list_of(items)?;
            }
            b'd' => {
                let items = self.above_mark()?;
                self.push_node(Content::Dict(Vec::new()))?;
                self.set_items(&items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.above_mark()?;
                self.extend(items)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_item(key, value)?;
            }
            b'u' => {
                let items = self.above_mark()?;
                self.set_items(&items)?;
            }
            b'p' | b'q' | b'r' | 0x94 => self.put(opcode)?,
            b'g' | b'h' | b'j' => self.get(opcode)?,
            _ => return Err(refused(opcode)),
        }
        Ok(None)
    }

    /// `None` and booleans.
    fn constant(&mut self, opcode: u8) -> Result<(), Problem> {
        match opcode {
            0x88 => self.push_int(1),
            0x89 => self.push_int(0),
            _ => self.push(Value::OPAQUE),
        }
    }

    fn integer(&mut self, opcode: u8) -> Result<(), Problem> {
        let number = match opcode {
            b'K' => Some(self.bytes.byte()?.into()),
            b'M' => Some(u16::from_le_bytes(self.bytes.array()?).into()),
            b'J' => Some(i32::from_le_bytes(self.bytes.array()?).into()),
            0x8a | 0x8b => {
                let count = match opcode {
                    0x8a => u64::from(self.bytes.byte()?),
                    _ => u32::from_le_bytes(self.bytes.array()?).into(),
                };
                if count > LONGEST_STRING {
                    self.bytes.skip(count)?;
                    None
                } else {
                    little_endian(self.bytes.take(count)?)
                }
            }
            _ => decimal(&self.bytes.line()?)?,
        };
        match number {
            Some(number) => self.push_int(number),
            None => self.push(Value::OPAQUE),
        }
    }

    fn string(&mut self, opcode: u8) -> Result<(), Problem> {
        let is_text = !matches!(opcode, b'B' | b'C' | 0x8e | 0x96);
        if matches!(opcode, b'S' | b'V') {
            let line = self.bytes.line()?;
            return match opcode {
                b'V' => self.push_string(&raw_unicode(&line)),
                _ => {
                    let quoted = line.strip_prefix(b"'").and_then(|rest| rest.strip_suffix(b"'"));
                    self.push_string(&String::from_utf8_lossy(quoted.unwrap_or(&line)))
                }
            };
        }
        let length = match opcode {
            b'U' | b'C' | 0x8c => self.bytes.byte()?.into(),
            b'T' | b'X' | b'B' => u32::from_le_bytes(self.bytes.array()?).into(),
            _ => u64::from_le_bytes(self.bytes.array()?),
        };
        if length > LONGEST_STRING || !is_text {
            self.bytes.skip(length)?;
            return self.push(Value::OPAQUE);
        }
        let bytes = self.bytes.take(length)?;
        // Most strings are known, and valid as they are.
        if let Ok(text) = std::str::from_utf8(bytes)
            && let Some(id) = self.strings.get(text)
        {
            return self.push(Value::of(Kind::Str(id)));
        }
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.push_string(&text)
    }

    fn push_string(&mut self, text: &str) -> Result<(), Problem> {
        let id = match self.strings.get(text) {
            Some(id) => id,
            None => {
                self.spend(text.len() as u64 + 64)?;
                self.strings.insert(text.into())
            }
        };
        self.push(Value::of(Kind::Str(id)))
    }

    fn put(&mut self, opcode: u8) -> Result<(), Problem> {
        let at = match opcode {
            b'p' => self.index()?,
            b'q' => self.bytes.byte()?.into(),
            b'r' => u32::from_le_bytes(self.bytes.array()?).into(),
            _ => self.memo.len() as u64,
        };
        let value = self.top()?;
        // Writers count up; a place far away would be a table of nothing.
        if at > 2 * self.memo.len() as u64 + 1024 {
            return Err(Problem::Memo(at));
        }
        let place = at as usize;
        if place >= self.memo.len() {
            self.spend(8 * (place + 1 - self.memo.len()) as u64)?;
            self.memo.resize(place + 1, Value::OPAQUE);
        }
        self.memo[place] = value;
        self.nodes.memoized(value, at as u32);
        Ok(())
    }

    fn get(&mut self, opcode: u8) -> Result<(), Problem> {
        let at = match opcode {
            b'g' => self.index()?,
            b'h' => self.bytes.byte()?.into(),
            _ => u32::from_le_bytes(self.bytes.array()?).into(),
        };
        let value =
            usize::try_from(at).ok().and_then(|at| self.memo.get(at).copied()).ok_or(Problem::Memo(at))?;
        let value = self.nodes.resolve(value);
        self.nodes.share(value);
        self.push(value)
    }

    fn index(&mut self) -> Result<u64, Problem> {
        let line = self.bytes.line()?;
        let number = decimal(&line)?.and_then(|number| u64::try_from(number).ok());
        number
            .ok_or_else(|| Problem::Number(String::from_utf8_lossy(&line[..line.len().min(40)]).into_owned()))
    }

    /// A list or tuple of these.
    fn list_of(&mut self, items: Vec<Value>) -> Result<(), Problem> {
        self.push_node(Content::List(Vec::new()))?;
        self.extend(items)
    }

    /// Appends to the list on top.
    fn extend(&mut self, mut items: Vec<Value>) -> Result<(), Problem> {
        for item in &mut items {
            *item = self.record_of(*item)?;
        }
        self.spend(8 * items.len() as u64)?;
        let Kind::Node(list) = self.top()?.kind() else {
            return Err(Problem::Type("something is appended to what is no list"));
        };
        match self.nodes.content_mut(list) {
            Content::List(list) if list.is_empty() => *list = items,
            Content::List(list) => list.append(&mut items),
            _ => return Err(Problem::Type("something is appended to what is no list")),
        }
        Ok(())
    }

    fn set_item(&mut self, key: Value, value: Value) -> Result<(), Problem> {
        let value = self.record_of(value)?;
        self.spend(16)?;
        let Kind::Node(dict) = self.top()?.kind() else {
            return Err(Problem::Type("a key is set in what is no dictionary"));
        };
        match self.nodes.content_mut(dict) {
            Content::Dict(pairs) => pairs.push((key, value)),
            _ => return Err(Problem::Type("a key is set in what is no dictionary")),
        }
        Ok(())
    }

    /// Sets keys of the dictionary on top, which then is whole: writers set all keys of a small one at once.
    fn set_items(&mut self, items: &[Value]) -> Result<(), Problem> {
        if !items.len().is_multiple_of(2) {
            return Err(Problem::Type("a key has no value"));
        }
        for pair in items.chunks_exact(2) {
            self.set_item(pair[0], pair[1])?;
        }
        let top = self.top()?;
        let whole = self.record_of(top)?;
        if let Some(place) = self.stack.last_mut() {
            *place = whole;
        }
        Ok(())
    }

    /// The record that a dictionary is, or the value itself.
    fn record_of(&mut self, value: Value) -> Result<Value, Problem> {
        let value = self.nodes.resolve(value);
        let Kind::Node(id) = value.kind() else { return Ok(value) };
        let pairs = match self.nodes.content_mut(id) {
            // No record has as many keys as that; looking at larger ones again and again would take for ever.
            Content::Dict(pairs) if pairs.len() <= 64 => std::mem::take(pairs),
            _ => return Ok(value),
        };
        let spent = 16 * pairs.len() as u64;
        match self.record(&pairs)? {
            Some(record) => {
                self.left = self.left.saturating_add(spent + 48);
                self.nodes.replace(id, record, &mut self.memo);
                Ok(record)
            }
            None => {
                *self.nodes.content_mut(id) = Content::Dict(pairs);
                Ok(value)
            }
        }
    }

    fn record(&mut self, pairs: &[(Value, Value)]) -> Result<Option<Value>, Problem> {
        let fields = Fields::of(pairs);
        let kind = if let Some(name) = fields.action {
            let entry = Entry {
                action: action(name),
                address: int(fields.addr).or(int(fields.device_free)).unwrap_or(0),
                size: size(fields.size)?.unwrap_or(0),
                time_us: int(fields.time_us).unwrap_or(0),
                stream: self.stream(int(fields.stream).unwrap_or(0)),
                stack: self.stack_of(fields.frames)?,
            };
            self.spend(if self.entries.len() == self.entries.capacity() {
                40 * self.entries.len() as u64
            } else {
                0
            })?;
            self.entries.push(entry);
            Kind::Entry(self.entries.len() as u32 - 1)
        } else if let (Some(name), Some(filename), Some(line)) =
            (fields.name, fields.filename, int(fields.line))
        {
            let (Kind::Str(name), Kind::Str(filename)) = (name.kind(), filename.kind()) else {
                return Ok(None);
            };
            let frame = [name, filename, line as u32];
            Kind::Frame(match self.frames.get(&frame[..]) {
                Some(id) => id,
                None => {
                    self.spend(80)?;
                    self.frames.insert(frame.into())
                }
            })
        } else if let (Some(name), Some(bytes)) = (fields.state, size(fields.size)?) {
            let (real_size, stack) = self.history(fields.history);
            let stack = if fields.frames.is_some() { self.stack_of(fields.frames)? } else { stack };
            self.spend(40)?;
            self.blocks.push(ReadBlock {
                address: int(fields.address).unwrap_or(0),
                size: bytes,
                requested: size(fields.requested_size)?.or(real_size).unwrap_or(bytes),
                state: state(name),
                stack,
            });
            Kind::Block(self.blocks.len() as u32 - 1)
        } else if let Some(bytes) = size(fields.real_size)? {
            let stack = self.stack_of(fields.frames)?;
            self.spend(16)?;
            self.histories.push((bytes, stack));
            Kind::History(self.histories.len() as u32 - 1)
        } else if let (Some(blocks), Some(bytes)) = (fields.blocks, size(fields.total_size)?) {
            let segment = ReadSegment {
                device: int(fields.device).unwrap_or(0).min(u16::MAX.into()) as u32,
                address: int(fields.address).unwrap_or(0),
                size: bytes,
                stream: self.stream(int(fields.stream).unwrap_or(0)),
                large: fields.segment_type.is_some_and(|kind| word(kind) == "large"),
                expandable: int(fields.is_expandable).unwrap_or(0) != 0,
                blocks: self.blocks_of(blocks, int(fields.address).unwrap_or(0))?,
            };
            self.spend(64)?;
            self.segments.push(segment);
            Kind::Segment(self.segments.len() as u32 - 1)
        } else {
            return Ok(None);
        };
        Ok(Some(Value::of(kind)))
    }

    fn stream(&mut self, stream: u64) -> u16 {
        let next = self.streams.len().min(u16::MAX.into()) as u16;
        *self.streams.entry(stream).or_insert(next)
    }

    fn items(&self, value: Option<Value>) -> &[Value] {
        match value.map(|value| self.nodes.resolve(value).kind()) {
            Some(Kind::Node(id)) => match self.nodes.content(id) {
                Content::List(items) => items,
                _ => &[],
            },
            _ => &[],
        }
    }

    /// The stack that a list of frames is. The list becomes the stack wherever it is referred to.
    fn stack_of(&mut self, value: Option<Value>) -> Result<StackId, Problem> {
        let Some(value) = value.map(|value| self.nodes.resolve(value)) else { return Ok(StackId::NONE) };
        let id = match value.kind() {
            Kind::Stack(id) => return Ok(StackId(id)),
            Kind::Node(id) => id,
            _ => return Ok(StackId::NONE),
        };
        let frames = self.items(Some(value)).iter().filter_map(|frame| match frame.kind() {
            Kind::Frame(id) => Some(id),
            _ => None,
        });
        let frames: Vec<u32> = frames.collect();
        self.left = self.left.saturating_add(8 * frames.len() as u64 + 48);
        let stack = match self.stacks.get(&frames[..]) {
            Some(stack) => stack,
            None => {
                self.spend(4 * frames.len() as u64 + 64)?;
                self.stacks.insert(frames.into())
            }
        };
        self.nodes.replace(id, Value::of(Kind::Stack(stack)), &mut self.memo);
        Ok(StackId(stack))
    }

    /// The latest use of a block in 2.0.
    fn history(&self, value: Option<Value>) -> (Option<u64>, StackId) {
        let first = self.items(value).first().map(|value| value.kind());
        match first {
            Some(Kind::History(at)) => {
                let (size, stack) = self.histories[at as usize];
                (Some(size), stack)
            }
            _ => (None, StackId::NONE),
        }
    }

    /// The blocks of a segment, one behind the other; before 2.2 they bear no address.
    fn blocks_of(&mut self, value: Value, address: u64) -> Result<Vec<ReadBlock>, Problem> {
        self.spend(40 * self.items(Some(value)).len() as u64)?;
        let mut next = address;
        let blocks = self.items(Some(value)).iter().filter_map(|block| match block.kind() {
            Kind::Block(at) => self.blocks.get(at as usize).copied(),
            _ => None,
        });
        let place = |block: ReadBlock| {
            let address = next;
            next = next.saturating_add(block.size);
            ReadBlock { address, ..block }
        };
        Ok(blocks.map(place).collect())
    }

    /// The traces and segments of the whole: a dictionary, or the list of segments of `torch.cuda.memory_snapshot()`.
    fn root(&mut self, root: Value) -> Result<(Vec<Vec<u32>>, Vec<ReadSegment>), Problem> {
        let mut dict = None;
        if let Kind::Node(id) = root.kind()
            && let Content::Dict(pairs) = self.nodes.content(id)
        {
            let named =
                |name: &str| pairs.iter().find(|(key, _)| word(*key) == name).map(|(_, value)| *value);
            dict = Some((named("segments"), named("device_traces")));
        }
        let Some((segments, traces)) = dict else {
            return match self.segments_of(root)? {
                none if none.is_empty() => {
                    Err(Problem::NoSnapshot("it is no dictionary and no list of segments"))
                }
                segments => Ok((Vec::new(), segments)),
            };
        };
        let segments = self.segments_of(segments.ok_or(Problem::NoSnapshot("it has no segments"))?)?;
        let traces = traces.ok_or(Problem::NoSnapshot("it has no device_traces"))?;
        let devices = self.items(Some(traces)).to_vec();
        let mut entries = Vec::with_capacity(devices.len());
        for trace in devices {
            self.spend(4 * self.items(Some(trace)).len() as u64)?;
            let of_trace = self.items(Some(trace)).iter().filter_map(|entry| match entry.kind() {
                Kind::Entry(at) => Some(at),
                _ => None,
            });
            entries.push(of_trace.collect());
        }
        Ok((entries, segments))
    }

    fn segments_of(&mut self, value: Value) -> Result<Vec<ReadSegment>, Problem> {
        let segments = self.items(Some(value)).to_vec();
        let mut found: Vec<ReadSegment> = Vec::new();
        for segment in segments {
            if let Kind::Segment(at) = segment.kind() {
                self.spend(64 + 40 * self.segments[at as usize].blocks.len() as u64)?;
                found.push(self.segments[at as usize].clone());
            }
        }
        Ok(found)
    }

    fn snapshot(self, devices: Vec<Vec<u32>>, segments: Vec<ReadSegment>, file_bytes: u64) -> Snapshot {
        let frame = |parts: &[u32]| Frame { name: parts[0], filename: parts[1], line: parts[2] };
        Snapshot {
            strings: self.strings.into_vec(),
            frames: self.frames.into_vec().iter().map(|parts| frame(parts)).collect(),
            stacks: self.stacks.into_vec(),
            entries: self.entries,
            devices,
            segments,
            file_bytes,
        }
    }
}

/// Why an opcode is not carried out.
fn refused(opcode: u8) -> Problem {
    Problem::RunsCode(match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82..=0x84 => "EXT",
        0x97 | 0x98 => "NEXT_BUFFER",
        other => return Problem::Opcode(other),
    })
}
