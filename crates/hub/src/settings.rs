//! Where the hub and its cache are, as the environment variables of `huggingface_hub` say.
//!
//! <https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables>

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::error::HubError;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A secret that is sent to the hub alone and never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token, if the text can be one: visible ASCII characters after trimming.
    pub fn new(text: &str) -> Option<Token> {
        let text = text.trim();
        (!text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic())).then(|| Token(text.to_owned()))
    }

    pub(crate) fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Name and password of an address, shown to nobody but its server.
#[derive(Clone, PartialEq, Eq)]
pub struct Login(Vec<u8>);

impl Login {
    /// The login in an address: `https://name:password@host`.
    pub fn of(address: &str) -> Option<Login> {
        let (_, rest) = address.split_once("://")?;
        let (login, _) = rest.split(['/', '?', '#']).next()?.rsplit_once('@')?;
        Some(Login(percent_decoded(login)))
    }

    /// The value of the header that sends it (RFC 7617).
    pub(crate) fn authorization(&self) -> String {
        format!("Basic {}", STANDARD.encode(&self.0))
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(..)")
    }
}

fn percent_decoded(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, after @ ..] = rest {
        let escaped = match after {
            [high, low, ..] if *first == b'%' => {
                std::str::from_utf8(&[*high, *low]).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok())
            }
            _ => None,
        };
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    bytes
}

/// A text without the logins of the addresses in it, as it may be shown.
pub(crate) fn without_logins(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        out.push_str(before);
        out.push_str("://");
        let end = after.find(|c: char| matches!(c, '/' | '?' | '#' | '"') || c.is_whitespace());
        let authority = after.get(..end.unwrap_or(after.len())).unwrap_or_default();
        rest = after.get(authority.rfind('@').map_or(0, |at| at + 1)..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

/// How models are fetched.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Address of the hub, without a slash at its end and without a login, so that it may be shown.
    pub endpoint: String,
    /// Name and password for the hub's server, joined by a colon.
    pub login: Option<Login>,
    /// The folder with `models--org--name`.
    pub cache: PathBuf,
    /// The token that requests carry.
    pub token: Option<Token>,
    /// Whether only the cache is looked at.
    pub offline: bool,
    /// How often a request is tried again without any progress in between.
    pub retries: u32,
    /// Pause before the first new attempt; each attempt doubles the pause.
    pub retry_pause: Duration,
    /// How long a server may be silent.
    pub patience: Duration,
}

impl HubSettings {
    /// The hub itself with a cache in `cache`.
    pub fn new(cache: PathBuf) -> HubSettings {
        HubSettings {
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            login: None,
            cache,
            token: None,
            offline: false,
            retries: 4,
            retry_pause: Duration::from_millis(500),
            patience: Duration::from_secs(30),
        }
    }

    /// By the variables that `variable` reads: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HF_TOKEN`,
    /// `HF_TOKEN_PATH` and `HF_HUB_OFFLINE`. Without `HF_TOKEN` the token is the one that `hf auth login` stored.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<HubSettings, HubError> {
        let set = |key: &str| variable(key).filter(|value| !value.is_empty());
        let text = |key: &'static str| match set(key).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(HubError::Setting { key, reason: "is not UTF-8".to_owned() }),
        };
        let home = match (set("HF_HOME"), set("XDG_CACHE_HOME"), set("HOME").or_else(|| set("USERPROFILE"))) {
            (Some(home), ..) => Some(PathBuf::from(home)),
            (None, Some(caches), _) => Some(Path::new(&caches).join("huggingface")),
            (None, None, Some(user)) => Some(Path::new(&user).join(".cache/huggingface")),
            (None, None, None) => None,
        };
        let cache = match (set("HF_HUB_CACHE"), &home) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => home.join("hub"),
            (None, None) => {
                let reason = "is not set and there is no home folder; set it to a folder for the cache";
                return Err(HubError::Setting { key: "HF_HOME", reason: reason.to_owned() });
            }
        };
        // Links in it are relative, and the working folder may change.
        let cache = std::path::absolute(&cache).unwrap_or(cache);
        let mut settings = HubSettings::new(cache);
        if let Some(endpoint) = text("HF_ENDPOINT")? {
            let endpoint = endpoint.trim_end_matches('/');
            let scheme = endpoint.starts_with("https://") || endpoint.starts_with("http://");
            if !scheme || endpoint.parse::<ureq::http::Uri>().is_err() {
                let shown = without_logins(endpoint);
                let reason = format!("is {shown:?}; it must be an address such as {DEFAULT_ENDPOINT}");
                return Err(HubError::Setting { key: "HF_ENDPOINT", reason });
            }
            settings.login = Login::of(endpoint);
            settings.endpoint = without_logins(endpoint);
        }
        settings.offline = text("HF_HUB_OFFLINE")?
            .is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"));
        settings.token = match text("HF_TOKEN")? {
            Some(token) => Some(Token::new(&token).ok_or_else(|| HubError::Setting {
                key: "HF_TOKEN",
                reason: "holds characters that no token has".to_owned(),
            })?),
            None => {
                let path = set("HF_TOKEN_PATH").map(PathBuf::from).or(home.map(|home| home.join("token")));
                // A token that cannot be read is none; the hub says whether one is needed.
                path.and_then(|path| std::fs::read_to_string(path).ok()).and_then(|text| Token::new(&text))
            }
        };
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        HubSettings::from_variables(&|key| {
            variables.iter().find(|(name, _)| *name == key).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        let cache = |variables: &[(&str, &str)]| read(variables).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/u")]), Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/c")]), Path::new("/c/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/u"), ("HF_HOME", "/h")]), Path::new("/h/hub"));
        assert_eq!(cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/x")]), Path::new("/x"));
        assert!(read(&[]).unwrap_err().to_string().contains("HF_HOME"));
    }

    #[test]
    fn tokens_come_from_the_variable_or_the_file_and_are_not_shown() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let home = home.path().to_str().unwrap();
        let token = |variables: &[(&str, &str)]| read(variables).unwrap().token;
        assert_eq!(token(&[("HF_HOME", home)]), Token::new("hf_file"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN", "hf_env")]), Token::new("hf_env"));
        assert_eq!(token(&[("HOME", "/nowhere")]), None);
        assert!(read(&[("HF_HOME", home), ("HF_TOKEN", "a\r\nX: b")]).is_err());
        assert!(!format!("{:?}", read(&[("HF_HOME", home)])).contains("hf_file"));
    }

    #[test]
    fn endpoint_and_offline_are_checked() {
        let endpoint = read(&[("HOME", "/u"), ("HF_ENDPOINT", "http://localhost:1/")]).unwrap().endpoint;
        assert_eq!(endpoint, "http://localhost:1");
        assert!(read(&[("HOME", "/u"), ("HF_ENDPOINT", "localhost")]).is_err());
        let closed = read(&[("HOME", "/u"), ("HF_ENDPOINT", "https://me:s%3Acret@hub:8443/x/")]).unwrap();
        assert_eq!(closed.endpoint, "https://hub:8443/x");
        // `printf me:s:cret | base64`
        assert_eq!(closed.login.as_ref().unwrap().authorization(), "Basic bWU6czpjcmV0");
        assert!(!format!("{closed:?}").contains("cret"));
        for wrong in ["ftp://me:secret@hub", "http://me:secret@ho st", "http://me:secret@[hub"] {
            let error = read(&[("HOME", "/u"), ("HF_ENDPOINT", wrong)]).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let text = "could not ask http://a:b@c/d?e=f@g, nor https://h@i; j@k";
        assert_eq!(without_logins(text), "could not ask http://c/d?e=f@g, nor https://i; j@k");
        assert!(read(&[("HOME", "/u"), ("HF_HUB_OFFLINE", "1")]).unwrap().offline);
        assert!(!read(&[("HOME", "/u"), ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
    }
}
