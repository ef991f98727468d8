//! What a disk does: sequential writes and reads of a spill file, as the engine makes them.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Instant;

use plimsoll_memory::Region;

use crate::request::{Finished, Ticket};
use crate::{ALIGNMENT, BufferPool, DiskEngine, DiskError, EngineSettings, IoMode, SpillFile, SpillSettings};

/// The speed of one way to use a disk.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct DiskSpeed {
    /// How the file was really reached.
    pub mode: IoMode,
    /// Bytes of a request.
    pub block_bytes: u64,
    /// Requests under way at once.
    pub queue_depth: usize,
    /// Bytes written, and read again.
    pub bytes: u64,
    /// Seconds of writing, until the disk says that it has everything.
    pub write_seconds: f64,
    /// Seconds of reading.
    pub read_seconds: f64,
}

impl DiskSpeed {
    /// Bytes written in a second.
    pub fn write_rate(&self) -> f64 {
        self.bytes as f64 / self.write_seconds.max(f64::MIN_POSITIVE)
    }

    /// Bytes read in a second.
    pub fn read_rate(&self) -> f64 {
        self.bytes as f64 / self.read_seconds.max(f64::MIN_POSITIVE)
    }
}

/// Writes about `bytes` bytes in `folder`, in blocks and under way as `settings` say, and reads them again. The file is
/// gone afterwards.
pub fn measure(
    folder: &Path,
    bytes: u64,
    settings: EngineSettings,
    direct: bool,
) -> Result<DiskSpeed, DiskError> {
    let block_bytes = settings.piece_bytes.max(ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    let queue_depth = settings.queue_depth.max(1);
    let engine = DiskEngine::start(settings)?;
    let spill = SpillFile::create(&SpillSettings { folder: folder.to_owned(), budget: None, direct })?;
    let pool = BufferPool::new(queue_depth, block_bytes)?;
    // Touched beforehand, and of no pattern that a disk could leave out.
    let mut noise = 0x2545_f491_4f6c_dd1d_u64;
    for mut buffer in std::iter::from_fn(|| pool.take()).collect::<Vec<_>>() {
        for word in buffer.bytes_mut().as_chunks_mut::<8>().0 {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            *word = noise.to_le_bytes();
        }
        pool.give_back(buffer);
    }
    let blocks = (bytes / block_bytes).max(1);
    let place = spill.allocate(blocks * block_bytes)?;
    let starts = |i| place.start + i * block_bytes;
    let file = spill.file();

    let write_seconds =
        timed(&pool, blocks, |i, buffer| engine.write_back(file, starts(i), block_bytes, buffer))?;
    let syncing = Instant::now();
    let failed = |source| DiskError::open(folder, source);
    file.handle().sync_data().map_err(failed)?;
    let write_seconds = write_seconds + syncing.elapsed().as_secs_f64();
    let read_seconds =
        timed(&pool, blocks, |i, buffer| engine.prefetch(file, starts(i)..starts(i) + block_bytes, buffer))?;
    let (mode, bytes) = (file.mode(), blocks * block_bytes);
    Ok(DiskSpeed { mode, block_bytes, queue_depth, bytes, write_seconds, read_seconds })
}

/// Keeps as many requests under way as the pool has buffers.
fn timed(
    pool: &BufferPool,
    blocks: u64,
    mut begin: impl FnMut(u64, Region) -> Ticket,
) -> Result<f64, DiskError> {
    let began = Instant::now();
    let mut under_way: VecDeque<Ticket> = VecDeque::new();
    let finish = |ticket: Ticket| {
        let Finished { region, outcome } = ticket.wait();
        pool.give_back(region);
        outcome.map(|_| ())
    };
    for block in 0..blocks {
        let buffer = match pool.take() {
            Some(buffer) => buffer,
            None => {
                if let Some(oldest) = under_way.pop_front() {
                    finish(oldest)?;
                }
                pool.take().ok_or(DiskError::Stopped)?
            }
        };
        under_way.push_back(begin(block, buffer));
    }
    under_way.into_iter().try_for_each(finish)?;
    Ok(began.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        for (direct, queue_depth, piece_bytes) in [(true, 1, 4096), (true, 3, 5000), (false, 2, 65_536)] {
            let settings = EngineSettings { queue_depth, piece_bytes };
            let speed = measure(folder.path(), 100_000, settings, direct).unwrap();
            let block_bytes = piece_bytes / 4096 * 4096;
            assert_eq!((speed.queue_depth, speed.block_bytes), (queue_depth, block_bytes));
            assert_eq!(speed.bytes, 100_000 / block_bytes * block_bytes);
            assert!(speed.write_rate() > 0.0 && speed.read_rate() > 0.0);
            // What a clock showed: no round number.
            assert!(speed.read_seconds > 0.0 && speed.read_seconds.fract() != 0.0);
            assert!(direct || speed.mode == IoMode::Buffered);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
