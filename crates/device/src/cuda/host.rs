//! Host memory beside a card: page-locked, so that copies need no detour.

use std::ffi::c_uint;
use std::fmt;
use std::sync::Arc;

use plimsoll_memory::{Keeper, Region, Reservation};

use super::context::Context;
use crate::DeviceError;

/// Any context may use it.
const PORTABLE: c_uint = 1;

/// Keeps memory page-locked as long as it lives.
struct Pin {
    context: Arc<Context>,
    memory: Arc<Reservation>,
}

impl Keeper for Pin {}

impl Drop for Pin {
    fn drop(&mut self) {
        // Where the context cannot be entered, giving back is tried all the same.
        let _ = self.context.enter();
        // SAFETY: it was page-locked once.
        unsafe { (self.context.driver.functions().unpin)(self.memory.as_ptr().cast()) };
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pin").field(&self.memory).finish()
    }
}

/// Page-locked memory. Its pages are in memory at once.
pub(super) fn pinned(context: &Arc<Context>, bytes: u64) -> Result<Region, DeviceError> {
    let memory = Arc::new(Reservation::new(bytes)?);
    if memory.is_empty() {
        return Ok(Region::new(bytes)?);
    }
    context.enter()?;
    let functions = context.driver.functions();
    // SAFETY: the range is the reservation's, which the pin keeps.
    let code = unsafe { (functions.pin)(memory.as_ptr().cast(), memory.len(), PORTABLE) };
    context.driver.check("cuMemHostRegister", code)?;
    let pin = Pin { context: Arc::clone(context), memory: Arc::clone(&memory) };
    // SAFETY: nobody else has the reservation but the pin, which touches no byte.
    Ok(unsafe { Region::kept_by(memory, Arc::new(pin)) })
}
