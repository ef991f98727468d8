//! What ranks send each other, as a dry run counts it.

/// Why bytes go from rank to rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Everybody gets every part.
    AllGather,
    /// Everybody gets the terms of its own part of a sum.
    ReduceScatter,
    /// Everybody gets all of a sum.
    AllReduce,
    /// Everybody gets its own part of what each of the others has: rows for the experts of a rank, and back.
    AllToAll,
    /// One rank gets what another has: the border of two stages of a pipeline.
    Send,
}

impl Collective {
    /// Every kind, in the order in which they are listed.
    pub const ALL: [Collective; 5] = [
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::AllToAll,
        Collective::Send,
    ];

    /// The name in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllReduce => "all_reduce",
            Collective::AllToAll => "all_to_all",
            Collective::Send => "send",
        }
    }
}

/// What a rank has sent, by collective operation: bytes and messages, and how many of all bytes went to other machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Communicated {
    bytes: [u64; Collective::ALL.len()],
    messages: [u64; Collective::ALL.len()],
    between_machines: u64,
}

impl Communicated {
    /// One message of so many bytes; none of an empty one.
    pub fn of(within: Collective, bytes: u64) -> Communicated {
        Communicated::of_many(within, bytes, u64::from(bytes > 0))
    }

    /// So many messages of so many bytes together.
    pub fn of_many(within: Collective, bytes: u64, messages: u64) -> Communicated {
        let mut sent = Communicated::default();
        (sent.bytes[within as usize], sent.messages[within as usize]) = (bytes, messages);
        sent
    }

    /// Bytes within one kind of operation.
    pub fn bytes(&self, within: Collective) -> u64 {
        self.bytes[within as usize]
    }

    /// Messages within one kind of operation.
    pub fn messages(&self, within: Collective) -> u64 {
        self.messages[within as usize]
    }

    /// All bytes.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Bytes that went to ranks of other machines, where a plan knows which those are.
    pub fn between_machines(&self) -> u64 {
        self.between_machines
    }

    /// The same where `far` of `all` bytes go to other machines.
    #[must_use]
    pub fn to_other_machines(self, far: u64, all: u64) -> Communicated {
        let bytes = u128::from(self.total_bytes()) * u128::from(far.min(all)) / u128::from(all.max(1));
        Communicated { between_machines: bytes as u64, ..self }
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Communicated) -> Communicated {
        self.combine(other, u64::saturating_add)
    }

    /// What is left without `other`, which must be a part of it.
    #[must_use]
    pub fn less(self, other: Communicated) -> Communicated {
        self.combine(other, u64::saturating_sub)
    }

    /// Each number with the same one of another.
    pub(crate) fn combine(self, other: Communicated, with: impl Fn(u64, u64) -> u64) -> Communicated {
        let each = |a: [u64; Collective::ALL.len()], b: [u64; Collective::ALL.len()]| {
            std::array::from_fn(|i| with(a[i], b[i]))
        };
        Communicated {
            bytes: each(self.bytes, other.bytes),
            messages: each(self.messages, other.messages),
            between_machines: with(self.between_machines, other.between_machines),
        }
    }
}
