//! Address space taken from the OS once: pages are committed as they are touched and go back at the end.

/// An anonymous private mapping. Untouched pages cost nothing; touched ones read as zero at first.
#[derive(Debug)]
pub struct Reservation {
    address: *mut u8,
    mapped: usize,
    mapping: *mut u8,
    bytes: usize,
}

/// The OS refused the address space.
#[derive(Debug, thiserror::Error)]
#[error("the operating system refused {bytes} bytes of address space: {source} (is `ulimit -v` set lower?)")]
pub struct ReservationError {
    /// Bytes asked for.
    pub bytes: u64,
    /// The OS's reason.
    pub source: std::io::Error,
}

/// Where the OS backs memory with huge pages they are of this size; the reservation starts on one.
const HUGE_PAGE: usize = 2 << 20;

impl Reservation {
    /// Reserves `bytes` bytes, aligned to 2 MiB.
    pub fn new(bytes: u64) -> Result<Reservation, ReservationError> {
        let fail = |source| ReservationError { bytes, source };
        let length = usize::try_from(bytes)
            .ok()
            .and_then(|n| n.max(1).checked_add(HUGE_PAGE))
            .ok_or_else(|| fail(std::io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(fail(std::io::Error::last_os_error()));
        }
        let mapping = mapping.cast::<u8>();
        let shift = mapping.align_offset(HUGE_PAGE);
        let address = mapping.wrapping_add(shift);
        #[cfg(target_os = "linux")]
        {
            // Whole huge pages only, so that no page beyond `bytes` is ever committed. Advice: failure is fine.
            let whole = bytes as usize / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range lies inside the mapping made above.
            unsafe { libc::madvise(address.cast(), whole, libc::MADV_HUGEPAGE) };
        }
        Ok(Reservation { address, mapped: length, mapping, bytes: bytes as usize })
    }

    /// The first byte; `len()` bytes from here may be read and written while the reservation lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// The size asked for, in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Bytes of pages that are not in memory yet, because nobody has touched them; all where the system does not say.
    pub fn untouched_bytes(&self) -> u64 {
        #[cfg(target_os = "linux")]
        {
            // SAFETY: asks for a number.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            if let Some(page) = usize::try_from(page).ok().filter(|page| *page > 0) {
                let mut resident = vec![0u8; self.bytes.div_ceil(page)];
                // SAFETY: the range lies inside the mapping and starts on a page, and there is a byte for each of its pages.
                let answer = unsafe { libc::mincore(self.address.cast(), self.bytes, resident.as_mut_ptr()) };
                if answer == 0 {
                    let untouched = resident.iter().filter(|state| **state & 1 == 0).count();
                    return (untouched * page).min(self.bytes) as u64;
                }
            }
        }
        self.bytes as u64
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: `mapping` and `mapped` are what mmap returned, unmapped only here.
        unsafe { libc::munmap(self.mapping.cast(), self.mapped) };
    }
}

// SAFETY: the mapping is plain memory; those who share the pointer order their own accesses.
unsafe impl Send for Reservation {}
// SAFETY: as above; no method of a shared reservation touches its memory.
unsafe impl Sync for Reservation {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_writable_to_the_last_byte() {
        let reservation = Reservation::new(5_000_001).unwrap();
        assert_eq!(reservation.as_ptr() as usize % HUGE_PAGE, 0);
        for i in [0, 4_999_999, 5_000_000] {
            // SAFETY: i is below len().
            unsafe {
                assert_eq!(*reservation.as_ptr().add(i), 0);
                *reservation.as_ptr().add(i) = 7;
            }
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn pages_are_in_memory_once_they_are_touched() {
        const PAGES: usize = 3;
        let reservation = Reservation::new((PAGES as u64) << 16).unwrap();
        assert_eq!(reservation.untouched_bytes(), (PAGES as u64) << 16);
        for i in 0..PAGES << 16 {
            // SAFETY: i is below len().
            unsafe { *reservation.as_ptr().add(i) = 7 };
        }
        assert_eq!(reservation.untouched_bytes(), 0);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Reservation::new(u64::MAX - 4096).is_err());
    }
}
