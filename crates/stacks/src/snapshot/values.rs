//! Values of a pickle while it is read: 8 bytes each, with containers in slots that are given back once a record was made of them.

/// A value: a tag in the low 4 bits, a number or an index above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value(u64);

/// What a [`Value`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing that a snapshot's meaning depends on: `None`, floats, bytes, integers beyond 60 bits, used-up containers.
    Opaque,
    Int(i64),
    Str(u32),
    /// A list, tuple or dictionary.
    Node(u32),
    Frame(u32),
    Stack(u32),
    Entry(u32),
    Block(u32),
    Segment(u32),
    /// An element of a block's history in 2.0.
    History(u32),
}

impl Value {
    pub const OPAQUE: Value = Value(0);

    pub fn of(kind: Kind) -> Value {
        let pack = |tag: u64, payload: u64| Value(payload << 4 | tag);
        match kind {
            Kind::Opaque => Value::OPAQUE,
            Kind::Int(number) if (number << 4) >> 4 == number => pack(1, number as u64),
            Kind::Int(_) => Value::OPAQUE,
            Kind::Str(id) => pack(2, id.into()),
            Kind::Node(id) => pack(3, id.into()),
            Kind::Frame(id) => pack(4, id.into()),
            Kind::Stack(id) => pack(5, id.into()),
            Kind::Entry(id) => pack(6, id.into()),
            Kind::Block(id) => pack(7, id.into()),
            Kind::Segment(id) => pack(8, id.into()),
            Kind::History(id) => pack(9, id.into()),
        }
    }

    pub fn kind(self) -> Kind {
        let id = (self.0 >> 4) as u32;
        match self.0 & 15 {
            1 => Kind::Int(self.0 as i64 >> 4),
            2 => Kind::Str(id),
            3 => Kind::Node(id),
            4 => Kind::Frame(id),
            5 => Kind::Stack(id),
            6 => Kind::Entry(id),
            7 => Kind::Block(id),
            8 => Kind::Segment(id),
            9 => Kind::History(id),
            _ => Kind::Opaque,
        }
    }

    pub fn int(self) -> Option<u64> {
        match self.kind() {
            Kind::Int(number) => Some(number as u64),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Content {
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// What it became.
    Became(Value),
}

#[derive(Debug)]
struct Node {
    content: Content,
    /// Where the memo refers to it.
    memo: Option<u32>,
    /// Several values refer to it, so that its slot cannot be given back.
    shared: bool,
}

/// The containers that exist.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    slots: Vec<Node>,
    vacant: Vec<u32>,
}

impl Nodes {
    pub fn insert(&mut self, content: Content) -> Value {
        let node = Node { content, memo: None, shared: false };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slots[id as usize] = node;
                id
            }
            None => {
                self.slots.push(node);
                self.slots.len() as u32 - 1
            }
        };
        Value::of(Kind::Node(id))
    }

    pub fn content(&self, id: u32) -> &Content {
        &self.slots[id as usize].content
    }

    pub fn content_mut(&mut self, id: u32) -> &mut Content {
        &mut self.slots[id as usize].content
    }

    /// A second value refers to it.
    pub fn share(&mut self, value: Value) {
        if let Kind::Node(id) = value.kind() {
            self.slots[id as usize].shared = true;
        }
    }

    pub fn memoized(&mut self, value: Value, at: u32) {
        if let Kind::Node(id) = value.kind() {
            let node = &mut self.slots[id as usize];
            node.shared |= node.memo.is_some_and(|earlier| earlier != at);
            node.memo = Some(at);
        }
    }

    /// The node is `value` from now on: in the memo too, and its slot is free where nothing else can refer to it.
    pub fn replace(&mut self, id: u32, value: Value, memo: &mut [Value]) {
        let node = &mut self.slots[id as usize];
        node.content = Content::Became(value);
        if let Some(at) = node.memo.and_then(|at| memo.get_mut(at as usize))
            && at.kind() == Kind::Node(id)
        {
            *at = value;
        }
        if !node.shared {
            self.vacant.push(id);
        }
    }

    /// What the value is now.
    pub fn resolve(&self, value: Value) -> Value {
        match value.kind() {
            Kind::Node(id) => match self.content(id) {
                Content::Became(became) => *became,
                _ => value,
            },
            _ => value,
        }
    }
}
