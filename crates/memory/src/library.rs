//! A library that is loaded when it is asked for, as drivers of GPUs are: a machine without it is no failure to start.

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::NonNull;

/// Why a library, or a function of it, cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It could not be loaded.
    #[error("{0}")]
    NotLoaded(String),
    /// It has no function of that name.
    #[error("it has no {0}")]
    NoFunction(String),
}

/// An open library; it is closed when this value is dropped.
#[derive(Debug)]
pub struct Library(NonNull<c_void>);

// SAFETY: a handle that may be used and closed from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library: a file by its path, or by a plain name what the system's loader finds.
    ///
    /// # Errors
    /// [`LibraryError::NotLoaded`] with the loader's words.
    pub fn open(path: &Path) -> Result<Library, LibraryError> {
        let not_loaded = |why: String| LibraryError::NotLoaded(why);
        let name = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| not_loaded(format!("{} is no name of a file", path.display())))?;
        // SAFETY: the name ends with a zero. Loading a library runs its initialisers; whoever names it trusts it.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(library).map(Library).ok_or_else(|| {
            // SAFETY: after a failure dlerror gives this thread's message, which lives until the next such call.
            let message = unsafe { libc::dlerror() };
            not_loaded(match message.is_null() {
                true => "no reason was given".to_owned(),
                // SAFETY: it is not null, and dlerror's messages end with a zero.
                false => unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned(),
            })
        })
    }

    /// The address of a function.
    ///
    /// # Errors
    /// [`LibraryError::NoFunction`].
    ///
    /// # Safety
    /// `F` has to be the type that the function of that name has. It must not be called after the library is dropped.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, LibraryError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is open and the name ends with a zero.
        let address = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        if address.is_null() {
            return Err(LibraryError::NoFunction(name.to_string_lossy().into_owned()));
        }
        // SAFETY: both are as large as a pointer, which is not null; the caller answers for the type.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: it was opened once and is closed once; whoever holds its functions holds it too.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}
