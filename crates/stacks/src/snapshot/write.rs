//! Snapshots of simulated allocators, as PyTorch writes them, to be opened by PyTorch's own viewer (<https://pytorch.org/memory_viz>).

use std::collections::HashMap;
use std::io::{self, Write};

use crate::allocator::{Action, CachingAllocator, Segment, SegmentBlock, TraceEntry, TraceTag};

/// A line of code, or of a program of a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StackFrame {
    /// The function.
    pub name: String,
    /// The file.
    pub filename: String,
    /// The line, from 1.
    pub line: u32,
}

/// Whose snapshots it looks like: keys came with versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TorchVersion {
    /// Blocks have a `history`; no times.
    V2_0,
    /// Blocks have `frames` and `requested_size`, segments `is_expandable`; settings are there.
    V2_1,
    /// Entries have `time_us`, blocks an address.
    V2_2,
    /// `external_annotations`.
    V2_6,
    /// Entries have `user_metadata` and `compile_context`.
    V2_9,
}

/// How it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As Python's `pickle.dump`, protocol 4.
    Python(TorchVersion),
    /// As PyTorch's C++ writer, protocol 2.
    Cpp(TorchVersion),
}

/// Writes what the allocators of devices 0, 1, ... hold and have recorded. `frames_of` gives the frames of a tag, innermost first; the
/// entries are a microsecond apart.
///
/// # Errors
/// Where `out` cannot be written.
pub fn write_snapshot(
    devices: &[&CachingAllocator],
    mut frames_of: impl FnMut(TraceTag) -> Vec<StackFrame>,
    format: Format,
    out: impl Write,
) -> io::Result<()> {
    let (version, cpp) = match format {
        Format::Python(version) => (version, false),
        Format::Cpp(version) => (version, true),
    };
    let mut writer = Writer {
        out,
        cpp,
        strings: HashMap::new(),
        frames: HashMap::new(),
        stacks: HashMap::new(),
        memoized: 0,
    };
    let frames_of: &mut dyn FnMut(TraceTag) -> Vec<StackFrame> = &mut frames_of;
    writer.begin()?;
    writer.dict(|writer| {
        writer.string("segments")?;
        writer.list(|writer| {
            for (device, allocator) in devices.iter().enumerate() {
                for segment in allocator.segments() {
                    writer.segment(device as u64, &segment, version, frames_of)?;
                }
            }
            Ok(())
        })?;
        writer.string("device_traces")?;
        writer.list(|writer| {
            for allocator in devices {
                writer.list(|writer| {
                    for (at, entry) in allocator.history().enumerate() {
                        writer.entry(at as u64, entry, version, frames_of)?;
                    }
                    Ok(())
                })?;
            }
            Ok(())
        })?;
        if version >= TorchVersion::V2_1 {
            writer.string("allocator_settings")?;
            writer.settings(devices.first().copied())?;
        }
        if version >= TorchVersion::V2_6 {
            writer.string("external_annotations")?;
            writer.list(|_| Ok(()))?;
        }
        Ok(())
    })?;
    writer.end()
}

struct Writer<W> {
    out: W,
    cpp: bool,
    strings: HashMap<String, u32>,
    frames: HashMap<StackFrame, u32>,
    stacks: HashMap<TraceTag, u32>,
    memoized: u32,
}

type Written = io::Result<()>;

impl<W: Write> Writer<W> {
    fn begin(&mut self) -> Written {
        self.out.write_all(&[0x80, if self.cpp { 2 } else { 4 }])
    }

    fn end(&mut self) -> Written {
        self.out.write_all(b".")?;
        self.out.flush()
    }

    fn memoize(&mut self) -> io::Result<u32> {
        let at = self.memoized;
        self.memoized += 1;
        match (self.cpp, u8::try_from(at)) {
            (false, _) => self.out.write_all(&[0x94])?,
            (true, Ok(at)) => self.out.write_all(&[b'q', at])?,
            (true, Err(_)) => {
                self.out.write_all(b"r")?;
                self.out.write_all(&at.to_le_bytes())?;
            }
        }
        Ok(at)
    }

    fn get(&mut self, at: u32) -> Written {
        match u8::try_from(at) {
            Ok(at) => self.out.write_all(&[b'h', at]),
            Err(_) => {
                self.out.write_all(b"j")?;
                self.out.write_all(&at.to_le_bytes())
            }
        }
    }

    fn string(&mut self, text: &str) -> Written {
        if let Some(&at) = self.strings.get(text) {
            return self.get(at);
        }
        match u8::try_from(text.len()) {
            Ok(length) if !self.cpp => self.out.write_all(&[0x8c, length])?,
            _ => {
                let length =
                    u32::try_from(text.len()).map_err(|_| io::Error::other("a string above 4 GiB"))?;
                self.out.write_all(b"X")?;
                self.out.write_all(&length.to_le_bytes())?;
            }
        }
        self.out.write_all(text.as_bytes())?;
        let at = self.memoize()?;
        self.strings.insert(text.to_owned(), at);
        Ok(())
    }

    fn int(&mut self, number: u64) -> Written {
        if let Ok(byte) = u8::try_from(number) {
            return self.out.write_all(&[b'K', byte]);
        }
        if let Ok(small) = i32::try_from(number) {
            self.out.write_all(b"J")?;
            return self.out.write_all(&small.to_le_bytes());
        }
        // A ninth byte keeps the number positive.
        let bytes = number.to_le_bytes();
        let length = 8 - bytes.iter().rev().take_while(|byte| **byte == 0).count();
        let sign = usize::from(bytes[length - 1] & 0x80 != 0);
        self.out.write_all(&[0x8a, (length + sign) as u8])?;
        self.out.write_all(&bytes[..length])?;
        self.out.write_all(&[0][..sign])
    }

    fn boolean(&mut self, value: bool) -> Written {
        self.out.write_all(&[if value { 0x88 } else { 0x89 }])
    }

    fn none(&mut self) -> Written {
        self.out.write_all(b"N")
    }

    fn dict(&mut self, items: impl FnOnce(&mut Self) -> Written) -> Written {
        self.out.write_all(b"}")?;
        self.memoize()?;
        self.out.write_all(b"(")?;
        items(self)?;
        self.out.write_all(b"u")
    }

    fn list(&mut self, items: impl FnOnce(&mut Self) -> Written) -> Written {
        self.out.write_all(b"]")?;
        self.memoize()?;
        self.out.write_all(b"(")?;
        items(self)?;
        self.out.write_all(b"e")
    }

    fn pair(&mut self, key: &str, number: u64) -> Written {
        self.string(key)?;
        self.int(number)
    }

    fn frames(&mut self, tag: TraceTag, frames_of: &mut dyn FnMut(TraceTag) -> Vec<StackFrame>) -> Written {
        self.string("frames")?;
        if let Some(&at) = self.stacks.get(&tag) {
            return self.get(at);
        }
        let at = self.memoized;
        let frames = frames_of(tag);
        self.list(|writer| frames.iter().try_for_each(|frame| writer.frame(frame)))?;
        self.stacks.insert(tag, at);
        Ok(())
    }

    fn frame(&mut self, frame: &StackFrame) -> Written {
        if let Some(&at) = self.frames.get(frame) {
            return self.get(at);
        }
        let at = self.memoized;
        self.dict(|writer| {
            for (key, text) in [("name", &frame.name), ("filename", &frame.filename)] {
                writer.string(key)?;
                writer.string(text)?;
            }
            writer.pair("line", frame.line.into())
        })?;
        self.frames.insert(frame.clone(), at);
        Ok(())
    }

    fn segment(
        &mut self,
        device: u64,
        segment: &Segment,
        version: TorchVersion,
        frames_of: &mut dyn FnMut(TraceTag) -> Vec<StackFrame>,
    ) -> Written {
        use crate::allocator::BlockState::{Allocated, Inactive};
        let sum = |value: &dyn Fn(&SegmentBlock) -> u64| segment.blocks.iter().map(value).sum::<u64>();
        let allocated = sum(&|block| if block.state == Allocated { block.size } else { 0 });
        let active = sum(&|block| if block.state == Inactive { 0 } else { block.size });
        self.dict(|writer| {
            writer.pair("device", device)?;
            writer.pair("address", segment.address)?;
            writer.pair("total_size", segment.size)?;
            writer.pair("allocated_size", allocated)?;
            writer.pair("active_size", active)?;
            writer.pair("stream", segment.stream.into())?;
            writer.string("segment_type")?;
            writer.string(if segment.small { "small" } else { "large" })?;
            if version >= TorchVersion::V2_1 {
                writer.pair("requested_size", sum(&|block| block.requested))?;
                writer.string("is_expandable")?;
                writer.boolean(segment.expandable)?;
                writer.frames(segment.tag, frames_of)?;
            }
            if version >= TorchVersion::V2_2 {
                writer.string("segment_pool_id")?;
                writer.out.write_all(&[b'K', 0, b'K', 0, 0x86])?;
                writer.memoize()?;
            }
            writer.string("blocks")?;
            writer.list(|writer| {
                segment.blocks.iter().try_for_each(|block| writer.block(block, version, frames_of))
            })
        })
    }

    fn block(
        &mut self,
        block: &SegmentBlock,
        version: TorchVersion,
        frames_of: &mut dyn FnMut(TraceTag) -> Vec<StackFrame>,
    ) -> Written {
        let inactive = block.state == crate::allocator::BlockState::Inactive;
        self.dict(|writer| {
            if version >= TorchVersion::V2_2 {
                writer.pair("address", block.address)?;
            }
            writer.pair("size", block.size)?;
            if version >= TorchVersion::V2_1 {
                writer.pair("requested_size", block.requested)?;
            }
            writer.string("state")?;
            writer.string(block.state.name())?;
            match version {
                TorchVersion::V2_0 if inactive => Ok(()),
                TorchVersion::V2_0 => {
                    writer.string("history")?;
                    writer.list(|writer| {
                        writer.dict(|writer| {
                            writer.pair("addr", block.address)?;
                            writer.pair("real_size", block.requested)?;
                            writer.frames(block.tag, frames_of)
                        })
                    })
                }
                _ if inactive => {
                    writer.string("frames")?;
                    writer.list(|_| Ok(()))
                }
                _ => writer.frames(block.tag, frames_of),
            }
        })
    }

    fn entry(
        &mut self,
        at: u64,
        entry: &TraceEntry,
        version: TorchVersion,
        frames_of: &mut dyn FnMut(TraceTag) -> Vec<StackFrame>,
    ) -> Written {
        self.dict(|writer| {
            writer.string("action")?;
            writer.string(entry.action.name())?;
            let address = if entry.action == Action::OutOfMemory { "device_free" } else { "addr" };
            writer.pair(address, entry.address)?;
            writer.pair("size", entry.size)?;
            writer.pair("stream", entry.stream.into())?;
            if version >= TorchVersion::V2_2 {
                writer.pair("time_us", at)?;
            }
            if version >= TorchVersion::V2_9 {
                writer.string("compile_context")?;
                writer.string("N/A")?;
                writer.string("user_metadata")?;
                writer.string("")?;
            }
            writer.frames(entry.tag, frames_of)
        })
    }

    fn settings(&mut self, allocator: Option<&CachingAllocator>) -> Written {
        let Some(settings) = allocator.map(CachingAllocator::settings) else { return self.dict(|_| Ok(())) };
        self.dict(|writer| {
            writer.string("max_split_size")?;
            match settings.max_split_size {
                Some(size) => writer.int(size)?,
                None => writer.out.write_all(&[b'J', 0xff, 0xff, 0xff, 0xff])?,
            }
            writer.string("garbage_collection_threshold")?;
            match settings.garbage_collection_threshold {
                Some(threshold) => {
                    writer.out.write_all(b"G")?;
                    writer.out.write_all(&threshold.to_be_bytes())?;
                }
                None => writer.none()?,
            }
            writer.string("expandable_segments")?;
            writer.boolean(settings.expandable_segments)
        })
    }
}
