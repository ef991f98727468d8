//! Hub ids: what is accepted leads into the cache and not out of it, and is printed as it is read.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_hub::HubId;

fuzz_target!(|text: &str| {
    let Ok(id) = text.parse::<HubId>() else { return };
    assert_eq!(id.to_string().parse::<HubId>().as_ref(), Ok(&id));
    let inside = |path: &str| {
        !path.starts_with('/') && path.split('/').all(|part| !matches!(part, "" | "." | "..")) && !path.contains('\\')
    };
    assert!(inside(id.repo()) && id.repo().split('/').count() == 2);
    assert!(inside(id.revision()) && id.file().is_none_or(inside), "{id:?}");
});
