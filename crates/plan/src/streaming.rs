//! How much of a model stays in memory where not all of it fits: as much as dry runs find room for, and the rest is
//! brought when it is needed.

use plimsoll_model::{Staging, StreamPlan};
use plimsoll_step::StepError;

/// Staging buffers: one in use and one on its way.
const BUFFERS: usize = 2;

/// The staging that brings the fewest bytes in a pass of those that fit `room`; `peak` runs the job dry with one. `None`
/// where the job does not fit with everything staged.
pub fn fitting_staging(
    plan: &StreamPlan,
    room: u64,
    mut peak: impl FnMut(&Staging) -> Result<u64, StepError>,
) -> Result<Option<Staging>, StepError> {
    let mut best: Option<Staging> = None;
    // A head that is larger than layers makes every buffer larger, so that it may be better kept.
    for resident_head in [true, false] {
        let mut fits = |resident: u32| -> Result<Option<Staging>, StepError> {
            let staging = plan.staging(resident, resident_head, BUFFERS);
            Ok((peak(&staging)? <= room).then_some(staging))
        };
        let Some(mut fitting) = fits(0)? else { continue };
        // `low` layers fit, `high` do not.
        let (mut low, mut high) = (0, plan.layers() + 1);
        while low + 1 < high {
            let middle = low.midpoint(high);
            match fits(middle)? {
                Some(staging) => (low, fitting) = (middle, staging),
                None => high = middle,
            }
        }
        if best.as_ref().is_none_or(|best| fitting.bytes_per_pass() < best.bytes_per_pass()) {
            best = Some(fitting);
        }
    }
    Ok(best)
}
