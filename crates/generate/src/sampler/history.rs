//! The tokens so far, for penalties.

use std::collections::{HashMap, VecDeque};

/// The last tokens. Where nothing asks for them, none are kept.
#[derive(Clone, Debug)]
pub struct History {
    /// How many are kept: `None` for nobody asks, `Some(None)` for all.
    kept: Option<Option<usize>>,
    tokens: VecDeque<u32>,
}

impl History {
    pub fn new(kept: Option<Option<usize>>) -> History {
        History { kept, tokens: VecDeque::new() }
    }

    pub fn extend(&mut self, tokens: &[u32]) {
        let Some(kept) = self.kept else { return };
        self.tokens.extend(tokens);
        if let Some(most) = kept {
            let surplus = self.tokens.len().saturating_sub(most);
            self.tokens.drain(..surplus);
        }
    }

    /// How often each of the last `last_n` tokens occurred.
    pub fn counts(&self, last_n: Option<usize>) -> HashMap<u32, u32> {
        let first = last_n.map_or(0, |last_n| self.tokens.len().saturating_sub(last_n));
        let mut counts = HashMap::new();
        for token in self.tokens.iter().skip(first) {
            let count: &mut u32 = counts.entry(*token).or_default();
            *count = count.saturating_add(1);
        }
        counts
    }
}
