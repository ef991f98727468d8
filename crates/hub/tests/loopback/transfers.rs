//! Files that break off, and files whose sizes are lies.

use std::fs;

use plimsoll_hub::{Hub, HubError};

use super::server::{Served, etag_of};
use super::{Setup, Told, weights};

const N: usize = 200_000;

fn with_weights(change: impl FnOnce(&mut Served)) -> Setup {
    let setup = Setup::with_model();
    let mut served = Served { bytes: weights(N), ..Served::default() };
    change(&mut served);
    setup.server.serve("model.safetensors", served);
    setup
}

fn no_weights(setup: &Setup) {
    let repo = setup.settings.cache.join("models--org--name");
    assert!(!repo.join("refs/main").exists());
    let snapshots = repo.join("snapshots");
    for commit in super::names(&snapshots) {
        assert!(!snapshots.join(commit).join("model.safetensors").exists());
    }
    assert!(!repo.join("blobs").join(etag_of(&weights(N))).exists());
}

#[test]
fn a_broken_connection_is_gone_on_with() {
    let setup = with_weights(|served| served.breaks_after = Some(60_000));
    let mut told = Told::default();
    let folder = setup.fetch_with("org/name", &mut told).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(N));
    let ranges: Vec<_> =
        setup.server.requests("/model.safetensors").into_iter().filter_map(|r| r.range).collect();
    assert_eq!(ranges, ["bytes=0-0", "bytes=60000-", "bytes=120000-", "bytes=180000-"]);
    assert_eq!((told.retries, told.bytes as u64), (3, told.total));
}

#[test]
fn a_later_fetch_goes_on_where_an_earlier_one_ended() {
    let mut setup = with_weights(|served| served.breaks_after = Some(150_000));
    setup.settings.retries = 0;
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(error, HubError::BrokenOff { have: 150_000, .. }), "{error}");
    no_weights(&setup);
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(N));
    assert!(
        setup
            .server
            .requests("/model.safetensors")
            .iter()
            .any(|r| r.range.as_deref() == Some("bytes=150000-"))
    );
}

#[test]
fn a_server_without_ranges_begins_again() {
    let setup = with_weights(|served| (served.breaks_after, served.ignores_ranges) = (Some(150_000), true));
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(error, HubError::BrokenOff { have: 150_000, .. }), "{error}");
    setup
        .server
        .serve("model.safetensors", Served { bytes: weights(N), ignores_ranges: true, ..Served::default() });
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(N));
}

#[test]
fn fewer_bytes_than_said_are_never_whole() {
    let more = Some(N as u64 + 10);
    let setup = with_weights(|served| (served.said, served.listed) = (more, more));
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(error, HubError::BrokenOff { .. }), "{error}");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    no_weights(&setup);
}

#[test]
fn sizes_that_contradict_each_other_are_refused() {
    for listed in [N as u64 - 1, N as u64 + 1, 0] {
        let setup = with_weights(|served| served.listed = Some(listed));
        let error = setup.fetch("org/name").unwrap_err();
        assert!(matches!(error, HubError::Sizes { .. }), "{error}");
        no_weights(&setup);
    }
}

#[test]
fn more_bytes_than_said_are_refused() {
    let less = Some(N as u64 - 10);
    let setup = with_weights(|served| {
        (served.said, served.listed, served.unmeasured) = (less, less, true);
    });
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(error, HubError::Sizes { .. }), "{error}");
    assert!(setup.blobs().iter().all(|name| !name.contains("incomplete")));
    no_weights(&setup);
}

#[test]
fn a_length_that_is_not_needed_may_be_missing() {
    let setup = with_weights(|served| served.unmeasured = true);
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(N));
}

#[test]
fn an_empty_file_is_a_file() {
    let setup = Setup::with_model();
    setup.server.file("tokenizer.json", b"");
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(fs::read(folder.join("tokenizer.json")).unwrap(), b"");
}

#[test]
fn a_busy_server_is_asked_again() {
    let setup = with_weights(|served| served.statuses = vec![503, 500, 502]);
    setup.server.with(|state| state.listing_statuses = vec![503, 429]);
    let mut told = Told::default();
    let folder = setup.fetch_with("org/name", &mut told).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(N));
    assert_eq!(told.retries, 5);
}

#[test]
fn a_server_that_stays_busy_is_an_error() {
    let setup = with_weights(|served| served.statuses = vec![503; 50]);
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("503") && error.contains("model.safetensors"), "{error}");
}

#[test]
fn content_is_checked_where_the_hub_names_its_hash() {
    let right = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    for (bytes, fine) in [(b"test", true), (b"tesT", false)] {
        let setup = with_weights(|served| {
            (served.bytes, served.etag) = (bytes.to_vec(), Some(right.to_owned()));
        });
        let fetched = setup.fetch("org/name");
        assert_eq!(fetched.is_ok(), fine);
        if let Err(error) = fetched {
            assert!(matches!(error, HubError::Content { .. }), "{error}");
            assert!(setup.blobs().iter().all(|name| !name.contains(right)));
        }
    }
}

#[test]
fn a_content_of_another_size_is_fetched_again() {
    let setup = with_weights(|_| ());
    let folder = setup.fetch("org/name").unwrap();
    // As a crash of the machine may leave it.
    let blob = fs::canonicalize(folder.join("model.safetensors")).unwrap();
    fs::write(&blob, b"half").unwrap();
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(N));
}

#[test]
fn too_little_space_is_said_before_anything_comes() {
    let setup = with_weights(|_| ());
    let hub = Hub::new(setup.settings.clone(), |_| Ok((16 << 20) + 150_000));
    let error = hub.fetch(&"org/name".parse().unwrap(), &mut ()).unwrap_err();
    assert!(matches!(error, HubError::Space { need: 200_000, .. }), "{error}");
    let whole = setup.server.requests("/model.safetensors").into_iter().filter(|r| r.range.is_none()).count();
    assert_eq!(whole, 0);
}
