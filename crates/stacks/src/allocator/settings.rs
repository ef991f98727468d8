//! Settings of the allocator, and their text in `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`.

use super::sizes::LARGE_BUFFER;

const MIB: u64 = 1 << 20;

/// Ranges of sizes that `roundup_power2_divisions` tells apart: from 1 MiB, a power of two each, the last from 32 GiB on.
pub const DIVISION_RANGES: usize = 16;

/// When a block that another stream uses can be handed out again. On a GPU that depends on when the other stream is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CrossStreamReuse {
    /// At the next request: other streams are done at once. The lower bound of memory.
    #[default]
    NextRequest,
    /// After the next [`synchronize`](super::CachingAllocator::synchronize), or when memory runs out. The upper bound of memory.
    Synchronisation,
}

/// What decides how the allocator behaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `max_split_size_mb`, in bytes.
    pub max_split_size: Option<u64>,
    /// `max_non_split_rounding_mb`, in bytes; 20 MiB unless set.
    pub max_non_split_rounding: Option<u64>,
    /// `roundup_power2_divisions` for sizes below 2 MiB, below 4 MiB, and so on; 0 and 1: none.
    pub roundup_power2_divisions: [u64; DIVISION_RANGES],
    /// `garbage_collection_threshold`: works with a memory fraction alone.
    pub garbage_collection_threshold: Option<f64>,
    /// `expandable_segments:True`
    pub expandable_segments: bool,
    /// `torch.cuda.set_per_process_memory_fraction`, of the device's whole memory.
    pub memory_fraction: Option<f64>,
    /// The rule for `record_stream`.
    pub cross_stream_reuse: CrossStreamReuse,
}

/// Why a text is no settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// No version of PyTorch knows the key.
    #[error("PYTORCH_CUDA_ALLOC_CONF: {key:?} is not a key of PyTorch's allocator")]
    UnknownKey {
        /// What was written.
        key: String,
    },
    /// The key has a value that PyTorch refuses.
    #[error("PYTORCH_CUDA_ALLOC_CONF: {key}:{value} cannot be; {expected}")]
    Value {
        /// The key.
        key: String,
        /// What was written.
        value: String,
        /// What could be written.
        expected: &'static str,
    },
    /// The key is followed by something other than a colon and a value, or the value by something other than a comma.
    #[error("PYTORCH_CUDA_ALLOC_CONF: {key} is followed by {found:?}; write key:value,key:value")]
    Form {
        /// The key.
        key: String,
        /// What stands there; empty: the end.
        found: String,
    },
    /// Another allocator altogether.
    #[error(
        "PYTORCH_CUDA_ALLOC_CONF: backend:{backend} is CUDA's own allocator, which is not simulated; leave backend out"
    )]
    Backend {
        /// Which one.
        backend: String,
    },
}

impl Settings {
    /// Settings from the text of `PYTORCH_CUDA_ALLOC_CONF`. Keys that change no byte are checked and have no effect.
    ///
    /// # Errors
    /// For a text that PyTorch refuses as well. The error names the key.
    ///
    /// ```
    /// # use plimsoll_stacks::allocator::Settings;
    /// let settings = Settings::parse("max_split_size_mb:128,garbage_collection_threshold:0.8")?;
    /// assert_eq!(settings.max_split_size, Some(128 << 20));
    /// # Ok::<(), plimsoll_stacks::allocator::SettingsError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let mut settings = Settings::default();
        let mut tokens = Tokens::of(text);
        while let Some(key) = tokens.next() {
            tokens.expect(&key, ":")?;
            settings.read_value(&key, &mut tokens)?;
            if !tokens.is_empty() {
                tokens.expect(&key, ",")?;
            }
        }
        Ok(settings)
    }

    fn read_value(&mut self, key: &str, tokens: &mut Tokens) -> Result<(), SettingsError> {
        const MEGABYTES: &str = "it takes a whole number of MiB, 20 or more";
        match key {
            "max_split_size_mb" => {
                let size = tokens.number(key, MEGABYTES, |mib| mib >= LARGE_BUFFER / MIB)?;
                self.max_split_size = Some(size.saturating_mul(MIB));
            }
            "max_non_split_rounding_mb" => {
                let size = tokens.number(key, MEGABYTES, |mib| mib >= LARGE_BUFFER / MIB)?;
                self.max_non_split_rounding = Some(size.saturating_mul(MIB));
            }
            "garbage_collection_threshold" => {
                self.garbage_collection_threshold =
                    Some(tokens.fraction(key, "it takes a number between 0 and 1", |x| 0.0 < x && x < 1.0)?);
            }
            "per_process_memory_fraction" => {
                self.memory_fraction = Some(
                    tokens.fraction(key, "it takes a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
                );
            }
            "roundup_power2_divisions" => self.read_divisions(key, tokens)?,
            "expandable_segments" => self.expandable_segments = tokens.boolean(key)?,
            "backend" => match tokens.value(key)?.as_str() {
                "native" => {}
                backend => return Err(SettingsError::Backend { backend: backend.to_owned() }),
            },
            "release_lock_on_cudamalloc"
            | "release_lock_on_hipmalloc"
            | "pinned_use_cuda_host_register"
            | "pinned_use_hip_host_register"
            | "pinned_use_background_threads"
            | "graph_capture_record_stream_reuse" => {
                tokens.boolean(key)?;
            }
            "pinned_num_register_threads" => {
                tokens.number(key, "it takes a power of two", u64::is_power_of_two)?;
            }
            "pinned_reserve_segment_size_mb" => {
                tokens.number(key, "it takes a whole number above 0", |mib| mib > 0)?;
            }
            _ => return Err(SettingsError::UnknownKey { key: key.to_owned() }),
        }
        Ok(())
    }

    /// A number for all sizes, or `[256:1,512:2,>:8]`: each number from that many MiB on, the first one below them too. A size that is
    /// left out keeps 0, and `>` begins at the last size that is named, as in PyTorch.
    fn read_divisions(&mut self, key: &str, tokens: &mut Tokens) -> Result<(), SettingsError> {
        const POWER: &str = "it takes powers of two";
        if tokens.peek() != Some("[") {
            let divisions = tokens.number(key, POWER, u64::is_power_of_two)?;
            self.roundup_power2_divisions = [divisions; DIVISION_RANGES];
            return Ok(());
        }
        tokens.expect(key, "[")?;
        let mut last = None;
        loop {
            let from = tokens.value(key)?;
            if from == "]" {
                return Ok(());
            }
            let range = match from.as_str() {
                ">" => None,
                mib => {
                    let mib = mib.parse().ok().filter(|mib: &u64| mib.is_power_of_two());
                    let mib = mib.ok_or_else(|| invalid(key, &from, "sizes are powers of two, in MiB"))?;
                    Some((mib.ilog2() as usize).min(DIVISION_RANGES - 1))
                }
            };
            tokens.expect(key, ":")?;
            let divisions = tokens.number(key, POWER, |n| n == 0 || n.is_power_of_two())?;
            let ranges = match (range, last) {
                (None, last) => last.unwrap_or(0)..=DIVISION_RANGES - 1,
                (Some(range), None) => 0..=range,
                (Some(range), Some(_)) => range..=range,
            };
            self.roundup_power2_divisions[ranges].fill(divisions);
            last = range.or(last);
            if tokens.peek() != Some("]") {
                tokens.expect(key, ",")?;
            }
        }
    }

    /// How many steps there are between powers of two for a request of `bytes`; 0: none.
    pub(super) fn divisions_of(&self, bytes: u64) -> u64 {
        let range = bytes.max(MIB).ilog2() - MIB.ilog2();
        self.roundup_power2_divisions[(range as usize).min(DIVISION_RANGES - 1)]
    }

    /// Blocks from here on are never split.
    pub(super) fn split_limit(&self) -> u64 {
        self.max_split_size.unwrap_or(u64::MAX)
    }
}

fn invalid(key: &str, value: &str, expected: &'static str) -> SettingsError {
    SettingsError::Value { key: key.to_owned(), value: value.to_owned(), expected }
}

/// Words and the signs `,:[]` between them; spaces mean nothing.
struct Tokens {
    rest: std::collections::VecDeque<String>,
}

impl Tokens {
    fn of(text: &str) -> Self {
        let mut rest = std::collections::VecDeque::new();
        let mut word = String::new();
        for character in text.chars().filter(|c| *c != ' ') {
            if !",:[]".contains(character) {
                word.push(character);
                continue;
            }
            if !word.is_empty() {
                rest.push_back(std::mem::take(&mut word));
            }
            rest.push_back(character.to_string());
        }
        if !word.is_empty() {
            rest.push_back(word);
        }
        Tokens { rest }
    }

    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn next(&mut self) -> Option<String> {
        self.rest.pop_front()
    }

    fn peek(&self) -> Option<&str> {
        self.rest.front().map(String::as_str)
    }

    fn expect(&mut self, key: &str, sign: &str) -> Result<(), SettingsError> {
        match self.next() {
            Some(found) if found == sign => Ok(()),
            found => Err(SettingsError::Form { key: key.to_owned(), found: found.unwrap_or_default() }),
        }
    }

    fn value(&mut self, key: &str) -> Result<String, SettingsError> {
        self.next().ok_or_else(|| SettingsError::Form { key: key.to_owned(), found: String::new() })
    }

    fn number(
        &mut self,
        key: &str,
        expected: &'static str,
        allowed: impl Fn(u64) -> bool,
    ) -> Result<u64, SettingsError> {
        let value = self.value(key)?;
        value.parse().ok().filter(|n| allowed(*n)).ok_or_else(|| invalid(key, &value, expected))
    }

    fn fraction(
        &mut self,
        key: &str,
        expected: &'static str,
        allowed: impl Fn(f64) -> bool,
    ) -> Result<f64, SettingsError> {
        let value = self.value(key)?;
        value.parse().ok().filter(|x| allowed(*x)).ok_or_else(|| invalid(key, &value, expected))
    }

    fn boolean(&mut self, key: &str) -> Result<bool, SettingsError> {
        let value = self.value(key)?;
        match value.as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => Err(invalid(key, &value, "it takes True or False")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divisions(text: &str) -> [u64; DIVISION_RANGES] {
        Settings::parse(text).unwrap().roundup_power2_divisions
    }

    #[test]
    fn every_key_that_pytorch_knows_is_read() {
        let text = "max_split_size_mb:64, garbage_collection_threshold:0.6,expandable_segments:True,backend:native,\
                    max_non_split_rounding_mb:128,per_process_memory_fraction:0.5,pinned_num_register_threads:8,\
                    pinned_use_cuda_host_register:True,release_lock_on_cudamalloc:False";
        let settings = Settings::parse(text).unwrap();
        assert_eq!(settings.max_split_size, Some(64 << 20));
        assert_eq!(settings.max_non_split_rounding, Some(128 << 20));
        assert_eq!(settings.garbage_collection_threshold, Some(0.6));
        assert_eq!(settings.memory_fraction, Some(0.5));
        assert!(settings.expandable_segments);
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
    }

    #[test]
    fn divisions_come_for_all_sizes_or_by_size() {
        assert_eq!(divisions("roundup_power2_divisions:4"), [4; DIVISION_RANGES]);
        let by_size = divisions("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        assert_eq!(by_size[..9], [1; 9]);
        assert_eq!((by_size[9], by_size[10], by_size[15]), (2, 8, 8));
        let gap = divisions("roundup_power2_divisions:[64:2,256:4]");
        assert_eq!((gap[6], gap[7], gap[8], gap[9]), (2, 0, 4, 0));
    }

    #[test]
    fn what_pytorch_refuses_is_refused_with_the_key() {
        for (text, named) in [
            ("max_split_size_mb:19", "max_split_size_mb"),
            ("max_split_size_mb", "max_split_size_mb"),
            ("max_split_size_mb=128", "max_split_size_mb=128"),
            ("max_split_size_mb:-1", "max_split_size_mb:-1"),
            ("garbage_collection_threshold:1", "garbage_collection_threshold"),
            ("garbage_collection_threshold:nan", "garbage_collection_threshold"),
            ("roundup_power2_divisions:3", "roundup_power2_divisions"),
            ("roundup_power2_divisions:[300:2]", "roundup_power2_divisions:300"),
            ("roundup_power2_divisions:[256:3]", "roundup_power2_divisions:3"),
            ("roundup_power2_divisions:[256:2", "roundup_power2_divisions"),
            ("expandable_segments:true", "expandable_segments:true"),
            ("expandable_segments:True;x:1", "expandable_segments"),
            ("backend:cudaMallocAsync", "cudaMallocAsync"),
            ("max_split:20", "max_split"),
        ] {
            let error = Settings::parse(text).expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
