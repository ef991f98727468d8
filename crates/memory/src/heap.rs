//! The heap of the process, which lies beside all arenas.

/// Gives memory that the heap holds without need back to the system, where the allocator can do so. Worth it after
/// something large was built of many small pieces, such as a tokenizer from its file.
pub fn release_free_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: glibc's own function, which takes its locks; no pointer is given or kept.
        unsafe { libc::malloc_trim(0) };
    }
}
