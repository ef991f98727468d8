//! Models that are not there, may not be had, or are served by somebody with bad intentions.

use plimsoll_hub::{HubError, Login, Token};

use super::server::{COMMIT, Served};
use super::{Setup, names};

#[test]
fn a_closed_model_says_how_to_open_it() {
    let mut setup = Setup::with_model();
    setup.server.with(|state| state.token = Some("hf_right".to_owned()));
    let error = setup.fetch("org/name").unwrap_err().to_string();
    for part in ["org/name", "401", "HF_TOKEN", "hf auth login", "Access is restricted."] {
        assert!(error.contains(part), "{error}");
    }
    setup.settings.token = Token::new("hf_wrong");
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("does not open it") && !error.contains("hf_wrong"), "{error}");
}

#[test]
fn a_password_in_the_address_is_sent_and_never_shown() {
    let mut setup = Setup::with_model();
    // `printf me:secret | base64`
    setup.server.with(|state| state.authorization = Some("Basic bWU6c2VjcmV0".to_owned()));
    setup.settings.login = Login::of("http://me:secret@hub");
    setup.fetch("org/name").unwrap();
    setup.server.with(|state| state.authorization = Some("Basic other".to_owned()));
    let again = setup.fetch("org/other").unwrap_err().to_string();
    assert!(again.contains("401") && !again.contains("secret") && !again.contains("bWU6"), "{again}");
}

#[test]
fn a_forbidden_file_is_not_taken_for_a_missing_one() {
    let setup = Setup::with_model();
    let forbidden = Served { bytes: b"x".to_vec(), statuses: vec![403], ..Served::default() };
    setup.server.serve("model.safetensors", forbidden);
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(error, HubError::Access { status: 403, .. }), "{error}");
}

#[test]
fn what_is_not_there_names_what_is_near() {
    let setup = Setup::new();
    setup.server.file("model.Q4_K_M.gguf", b"GGUF");
    setup.server.file("model.Q8_0.gguf", b"GGUF");
    let error = setup.fetch("org/name:model.q4_k_m.gguf").unwrap_err().to_string();
    assert!(error.contains("it has model.Q4_K_M.gguf, model.Q8_0.gguf"), "{error}");
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("org/name:model.Q8_0.gguf"), "{error}");

    setup.server.with(|state| {
        state.listing = Some((404, String::new()));
        state.error_code = Some("RepoNotFound");
    });
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("no such file or folder here") && error.contains("spelling"), "{error}");
    setup.server.with(|state| state.error_code = Some("RevisionNotFound"));
    let error = setup.fetch("org/name@v9").unwrap_err().to_string();
    assert!(error.contains("no revision \"v9\""), "{error}");
}

#[test]
fn a_repository_without_weights_says_so() {
    let setup = Setup::new();
    setup.server.file("config.json", b"{}");
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(error, HubError::NoWeights { pickles: false, .. }), "{error}");
    setup.server.file("pytorch_model.bin", b"");
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("pickle"), "{error}");
}

#[test]
fn names_never_lead_out_of_the_cache() {
    let outside = |setup: &Setup| {
        let found = names(setup.cache.path());
        assert!(found.iter().all(|name| name == "hub"), "{found:?}");
    };
    // In the listing.
    let setup = Setup::with_model();
    setup.server.file("../../../evil", b"x");
    assert!(matches!(setup.fetch("org/name").unwrap_err(), HubError::Answer { .. }));
    outside(&setup);
    // As the commit.
    let setup = Setup::with_model();
    let siblings = r#"[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]"#;
    let listing = format!(r#"{{"sha":"../../../evil","siblings":{siblings}}}"#);
    setup.server.with(|state| state.listing = Some((200, listing)));
    assert!(matches!(setup.fetch("org/name").unwrap_err(), HubError::Answer { .. }));
    outside(&setup);
    // As the name of a content.
    for etag in ["../../../evil", "/tmp/evil", "..", ""] {
        let setup = Setup::with_model();
        let served = Served { bytes: b"x".to_vec(), etag: Some(etag.to_owned()), ..Served::default() };
        setup.server.serve("config.json", served);
        let error = setup.fetch("org/name").unwrap_err();
        assert!(matches!(error, HubError::Answer { .. }), "{error}");
        outside(&setup);
    }
    // In the index.
    let setup = Setup::new();
    setup.server.file("config.json", b"{}");
    setup.server.file("model.safetensors.index.json", br#"{"weight_map":{"a":"../../evil.safetensors"}}"#);
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("outside its folder"), "{error}");
    outside(&setup);
}

#[test]
fn circles_and_dead_ends_end() {
    for to in ["/org/name/resolve/main/config.json", "", "file:///etc/passwd", "ftp://x/y"] {
        let setup = Setup::with_model();
        let served = Served { bytes: b"{}".to_vec(), redirect: Some(to.to_owned()), ..Served::default() };
        setup.server.serve("config.json", served);
        let error = setup.fetch("org/name").unwrap_err();
        assert!(matches!(error, HubError::Answer { .. }), "{to}: {error}");
    }
}

#[test]
fn a_model_that_changes_meanwhile_is_not_mixed() {
    let setup = Setup::with_model();
    let listing =
        r#"{"sha":"aaaa","siblings":[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]}"#;
    setup.server.with(|state| state.listing = Some((200, listing.to_owned())));
    let error = setup.fetch("org/name").unwrap_err();
    assert!(matches!(&error, HubError::Changed { after, .. } if after == COMMIT), "{error}");
}

#[test]
fn an_answer_that_is_no_listing_is_an_error() {
    for text in ["", "<html>", "[]", "{}", "{\"sha\":1}"] {
        let setup = Setup::with_model();
        setup.server.with(|state| state.listing = Some((200, text.to_owned())));
        let error = setup.fetch("org/name").unwrap_err().to_string();
        assert!(error.contains("HF_ENDPOINT"), "{error}");
    }
}
