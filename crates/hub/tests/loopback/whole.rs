//! Models that arrive.

use std::fs;

use super::server::{COMMIT, Served};
use super::{Setup, Told, names, weights};

#[test]
fn a_model_is_fetched_into_the_usual_layout() {
    let setup = Setup::with_model();
    let mut told = Told::default();
    let folder = setup.fetch_with("org/name", &mut told).unwrap();
    let repo = setup.settings.cache.join("models--org--name");
    assert_eq!(folder, repo.join("snapshots").join(COMMIT));
    assert_eq!(names(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(100_000));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(setup.blobs().len(), 3);
    assert!(names(&repo.join("blobs")).iter().all(|name| !name.contains("incomplete")));
    assert_eq!((told.bytes as u64, told.retries), (told.total, 0));
    #[cfg(unix)]
    assert!(fs::read_link(folder.join("config.json")).unwrap().starts_with("../../blobs"));
    // `hf-hub` finds it.
    let found =
        hf_hub::Cache::new(setup.settings.cache.clone()).model("org/name".to_owned()).get("config.json");
    assert_eq!(found.unwrap(), folder.join("config.json"));

    // A second time only the listing is asked for.
    let before = setup.server.requests("").len();
    assert_eq!(setup.fetch("org/name").unwrap(), folder);
    assert_eq!(setup.server.requests("").len(), before + 1);
}

#[test]
fn shards_are_those_of_the_index() {
    let setup = Setup::new();
    setup.server.file("config.json", b"{}");
    setup.server.file(
        "model.safetensors.index.json",
        br#"{"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#,
    );
    for name in ["m-1.safetensors", "m-2.safetensors", "m-3.safetensors"] {
        setup.server.file(name, name.as_bytes());
    }
    let folder = setup.fetch("org/name").unwrap();
    let expected = ["config.json", "m-1.safetensors", "m-2.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(&folder), expected);
}

#[test]
fn one_file_of_several() {
    let setup = Setup::new();
    setup.server.file("Q4_K.gguf", b"GGUF four");
    setup.server.file("sub/Q8 0.gguf", b"GGUF eight");
    let path = setup.fetch("org/name:sub/Q8 0.gguf").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"GGUF eight");
    assert!(path.ends_with("sub/Q8 0.gguf"));
    assert!(!setup.server.requests("sub/Q8%200.gguf").is_empty());
}

#[test]
fn a_lone_gguf_needs_no_name() {
    let mut setup = Setup::new();
    setup.server.file("only.gguf", b"GGUF");
    let path = setup.fetch("org/name").unwrap();
    assert!(path.ends_with("only.gguf"));
    setup.settings.offline = true;
    assert_eq!(setup.fetch("org/name").unwrap(), path);
}

#[test]
fn a_revision_has_its_own_reference() {
    let mut setup = Setup::with_model();
    let folder = setup.fetch("org/name@refs/pr/7").unwrap();
    assert!(!setup.server.requests("/resolve/refs%2Fpr%2F7/config.json").is_empty());
    let reference = setup.settings.cache.join("models--org--name/refs/refs/pr/7");
    assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);
    setup.settings.offline = true;
    assert_eq!(setup.fetch("org/name@refs/pr/7").unwrap(), folder);
    assert_eq!(setup.fetch(&format!("org/name@{COMMIT}")).unwrap(), folder);
    assert!(setup.fetch("org/name").is_err());
}

#[test]
fn offline_takes_what_is_whole_and_names_what_is_not() {
    let mut setup = Setup::with_model();
    setup.settings.offline = true;
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE") && error.contains("revision main"), "{error}");
    assert!(setup.server.requests("").is_empty());
    setup.settings.offline = false;
    let folder = setup.fetch("org/name").unwrap();
    setup.settings.offline = true;
    assert_eq!(setup.fetch("org/name").unwrap(), folder);
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let error = setup.fetch("org/name").unwrap_err().to_string();
    assert!(error.contains("lacks model.safetensors"), "{error}");
}

#[test]
fn an_unreachable_hub_is_no_obstacle_to_what_is_there() {
    let mut setup = Setup::with_model();
    let folder = setup.fetch("org/name").unwrap();
    // A port that nobody listens on.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    setup.settings.endpoint = format!("http://{closed}");
    let mut told = Told::default();
    assert_eq!(setup.fetch_with("org/name", &mut told).unwrap(), folder);
    assert!(told.unreachable);
    let error = setup.fetch("org/other").unwrap_err().to_string();
    assert!(error.contains("cannot be reached") && error.contains("HF_ENDPOINT"), "{error}");
}

#[test]
fn bytes_may_be_elsewhere_and_the_token_stays_here() {
    let mut setup = Setup::with_model();
    let elsewhere = super::server::Server::start();
    let secret = weights(5000);
    elsewhere.serve(
        "far",
        Served { bytes: secret.clone(), redirect: Some("unused".to_owned()), ..Served::default() },
    );
    let redirected = |to: String| Served { bytes: secret.clone(), redirect: Some(to), ..Served::default() };
    setup.server.serve("model.safetensors", redirected(format!("{}/cdn/far", elsewhere.address)));
    setup.server.serve("tokenizer.json", redirected("/cdn/tokenizer.json".to_owned()));
    setup.server.with(|state| state.token = Some("hf_secret".to_owned()));
    setup.settings.token = plimsoll_hub::Token::new("hf_secret");
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), secret);
    assert_eq!(fs::read(folder.join("tokenizer.json")).unwrap(), secret);
    assert!(!elsewhere.requests("").is_empty() || setup.blobs().len() == 2);
    assert!(elsewhere.requests("").iter().all(|request| request.authorization.is_none()));
    // The content's name is the hub's word, not the other server's.
    assert!(!setup.blobs().contains(&"another".to_owned()));
}

#[test]
fn a_server_without_listings_is_asked_for_each_file() {
    let setup = Setup::with_model();
    setup.server.with(|state| state.listing = Some((404, String::new())));
    let folder = setup.fetch("org/name").unwrap();
    assert_eq!(names(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
}

#[test]
fn one_file_is_fetched_once_however_many_want_it() {
    let setup = Setup::with_model();
    setup.server.file("model.safetensors", &weights(3_000_000));
    let folders: Vec<_> = std::thread::scope(|scope| {
        let fetches: Vec<_> = (0..4).map(|_| scope.spawn(|| setup.fetch("org/name").unwrap())).collect();
        fetches.into_iter().map(|fetch| fetch.join().unwrap()).collect()
    });
    for folder in &folders {
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights(3_000_000));
    }
    let whole = setup.server.requests("/model.safetensors").into_iter().filter(|r| r.range.is_none()).count();
    assert_eq!(whole, 1);
}

#[test]
fn the_token_is_sent_to_the_hub() {
    let mut setup = Setup::with_model();
    setup.server.with(|state| state.token = Some("hf_secret".to_owned()));
    setup.settings.token = plimsoll_hub::Token::new("hf_secret");
    setup.fetch("org/name").unwrap();
    assert!(setup.cache.path().exists());
}
