//! Requests to an arena made again, by one owner, for offsets and totals alone: without the locks and handles of [`Arena`](super::Arena).

use super::{ENDLESS, Inner, OutOfMemory};
use crate::Tier;
use crate::layout::Layout;
use crate::ledger::{Ledger, Phase, Tag};

/// The offsets, the ledger and the layouts of an arena without an end. Whoever takes a piece says when it goes back.
#[derive(Debug)]
pub struct Replay(Inner);

/// What a replay has taken.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    offset: u64,
    size: u64,
    tag: Tag,
    name: &'static str,
    owner: Option<u32>,
}

impl Replay {
    /// One in which nothing was taken; all offsets will be multiples of `alignment`.
    pub fn new(tier: Tier, alignment: u64) -> Replay {
        let mut inner = Inner::new(tier, ENDLESS, Ledger::default());
        inner.align_to(alignment);
        Replay(inner)
    }

    /// See [`Arena::alloc`](super::Arena::alloc).
    pub fn take(&mut self, bytes: u64, tag: Tag, name: &'static str) -> Result<Piece, OutOfMemory> {
        let size = self.0.whole(bytes);
        let offset = self.0.take(size, tag, name)?;
        Ok(Piece { offset, size, tag, name, owner: self.0.ledger.layer() })
    }

    /// Gives back what was taken here.
    pub fn give_back(&mut self, Piece { offset, size, tag, name, owner }: Piece) {
        self.0.give_back(offset, size);
        self.0.ledger.gave_back(tag, name, owner, offset, size);
    }

    /// See [`Arena::enter`](super::Arena::enter).
    pub fn enter(&mut self, phase: Phase, layer: Option<u32>) {
        self.0.ledger.enter(phase, layer);
    }

    /// See [`Arena::layout`](super::Arena::layout).
    pub fn layout(&self) -> Layout {
        self.0.layout()
    }

    /// The ledger as it stands.
    pub fn into_ledger(self) -> Ledger {
        self.0.ledger
    }
}
