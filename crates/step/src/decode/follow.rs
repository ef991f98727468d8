//! A decoder that is told by the first rank what to append, where nobody else knows it: the tokens of a chat.

use plimsoll_parallel::Collectives;

use super::Decoder;
use crate::StepError;

impl Decoder<'_> {
    /// From here on the other ranks [`follow`](Self::follow) this one, the first: nobody has to tell them what to append.
    pub fn lead(&mut self) {
        self.leads = true;
    }

    /// Appends what the first rank appends, until that one has no more.
    ///
    /// # Errors
    /// As of [`append`](Self::append); or the first rank is gone.
    pub fn follow(&mut self) -> Result<(), StepError> {
        loop {
            let Some(stages) = &self.stages else { return Ok(()) };
            let told = stages.broadcast(Vec::new())?;
            let mut words = told.chunks_exact(size_of::<u32>()).map(|word| {
                let mut bytes = [0; size_of::<u32>()];
                bytes.copy_from_slice(word);
                u32::from_le_bytes(bytes)
            });
            let Some(length) = words.next() else { return Ok(()) };
            let tokens: Vec<u32> = words.collect();
            self.truncate(u64::from(length));
            self.append(&tokens)?;
        }
    }

    /// Lets the ranks go that follow this one.
    ///
    /// # Errors
    /// One of them is gone.
    pub fn dismiss(&mut self) -> Result<(), StepError> {
        match &self.stages {
            Some(stages) if std::mem::take(&mut self.leads) => Ok(stages.broadcast(Vec::new()).map(drop)?),
            _ => Ok(()),
        }
    }

    /// Tells whoever follows how many tokens stay in the cache, and which come behind them.
    pub(super) fn tell(&self, sequence: u32, tokens: &[u32]) -> Result<(), StepError> {
        let Some(stages) = self.stages.as_ref().filter(|_| self.leads) else { return Ok(()) };
        if sequence > 0 {
            return Err(StepError::Invariant { what: "ranks that follow are told of one sequence alone" });
        }
        let length = u32::try_from(self.len()).unwrap_or(u32::MAX);
        let told = std::iter::once(length).chain(tokens.iter().copied()).flat_map(u32::to_le_bytes);
        stages.broadcast(told.collect())?;
        Ok(())
    }
}
