//! Size classes: how a request is rounded, which pool it belongs to, and how large a segment is made for it.

use super::settings::Settings;

/// Every block is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// The largest block of the small pool.
pub const SMALL_SIZE: u64 = 1 << 20;
/// A segment of the small pool, and a page of an expandable segment of that pool.
pub const SMALL_BUFFER: u64 = 2 << 20;
/// A segment for a request of the large pool below [`MIN_LARGE_ALLOC`], and a page of an expandable segment of that pool.
pub const LARGE_BUFFER: u64 = 20 << 20;
/// From here on a segment is as large as the request.
pub const MIN_LARGE_ALLOC: u64 = 10 << 20;
/// Such a segment is a multiple of this.
pub const ROUND_LARGE: u64 = 2 << 20;
/// PyTorch refuses a larger request before it looks at its pools: an exabyte.
pub const LARGEST_REQUEST: u64 = 1 << 60;

/// The size of the block for a request of `bytes`.
pub fn block_size(bytes: u64, settings: &Settings) -> u64 {
    if bytes < MIN_BLOCK {
        return MIN_BLOCK;
    }
    let divisions = settings.divisions_of(bytes);
    if divisions > 1 && bytes > MIN_BLOCK * divisions {
        round_to_division(bytes, divisions)
    } else {
        bytes.next_multiple_of(MIN_BLOCK)
    }
}

/// The space between two powers of two is cut into `divisions` (a power of two) steps; `bytes` goes up to the next one.
fn round_to_division(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1 << bytes.ilog2();
    match floor >> divisions.ilog2() {
        0 => floor << 1,
        step => bytes.next_multiple_of(step),
    }
}

/// Whether a block of `size` belongs to the small pool.
pub fn is_small(size: u64) -> bool {
    size <= SMALL_SIZE
}

/// The size of a segment that is made for a block of `size`.
pub fn segment_size(size: u64) -> u64 {
    if is_small(size) {
        SMALL_BUFFER
    } else if size < MIN_LARGE_ALLOC {
        LARGE_BUFFER
    } else {
        size.next_multiple_of(ROUND_LARGE)
    }
}

/// The size of a page of an expandable segment.
pub fn page_size(small: bool) -> u64 {
    if small { SMALL_BUFFER } else { LARGE_BUFFER }
}
