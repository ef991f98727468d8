//! The files in which a system shows itself, below a root that tests can move.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// System files below a root.
#[derive(Clone, Debug)]
pub struct SystemFiles {
    root: PathBuf,
}

impl SystemFiles {
    /// Those of this machine.
    pub fn of_this_machine() -> SystemFiles {
        SystemFiles { root: PathBuf::from("/") }
    }

    /// Those below another root: copies from another machine, or made up by a test.
    pub fn under(root: &Path) -> SystemFiles {
        SystemFiles { root: root.to_owned() }
    }

    /// The text of a file, given by its absolute path; `None` if it cannot be read.
    pub fn read(&self, path: &Path) -> Option<String> {
        /// `/proc/cpuinfo` of a machine with thousands of cores has a few megabytes.
        const MOST: u64 = 16 << 20;
        let path = self.root.join(path.strip_prefix("/").unwrap_or(path));
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The name of the machine, where the system shows it.
    pub fn host(&self) -> Option<String> {
        let name = self.read(Path::new("/proc/sys/kernel/hostname"))?;
        Some(name.trim().to_owned()).filter(|name| !name.is_empty())
    }

    /// The names in a folder, in no order; none if it cannot be read.
    pub fn names(&self, folder: &Path) -> Vec<String> {
        let folder = self.root.join(folder.strip_prefix("/").unwrap_or(folder));
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }
}

/// The value behind `key` in lines of `key: value` or `key value`.
pub fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        let value = rest.trim_start();
        let value = value.strip_prefix(':').or_else(|| (value.len() < rest.len()).then_some(value))?;
        Some(value.trim())
    })
}

/// A size in lines of `key: 1024 kB`, in bytes.
pub fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let number = field(text, key)?.strip_suffix("kB")?.trim();
    number.parse::<u64>().ok()?.checked_mul(1024)
}

/// The name of this machine, where the system shows it.
pub fn host() -> Option<String> {
    SystemFiles::of_this_machine().host()
}

/// The cores in a list such as `0-3,8`; ranges beyond any machine are cut.
pub fn core_list(text: &str) -> Vec<u32> {
    const MOST: u32 = 1 << 16;
    let mut cores = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            cores.extend(first..=last.min(MOST));
        }
    }
    cores.sort_unstable();
    cores.dedup();
    cores
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "VmRSS:\t    1768 kB\nRssAnonymous: 3 kB\nRssAnon:\t116 kB\ninactive_file 4096\nName: x: y\nbad: 12 MB";
        assert_eq!(kilobytes(text, "VmRSS"), Some(1768 << 10));
        assert_eq!(kilobytes(text, "RssAnon"), Some(116 << 10));
        assert_eq!(field(text, "inactive_file"), Some("4096"));
        assert_eq!(field(text, "Name"), Some("x: y"));
        assert_eq!(kilobytes(text, "bad"), None);
        assert_eq!(field(text, "Vm"), None);
    }

    #[test]
    fn core_lists_are_read() {
        for (text, cores) in [
            ("0-3,8\n", vec![0, 1, 2, 3, 8]),
            ("5", vec![5]),
            ("", vec![]),
            ("3-1", vec![]),
            ("1,x,0", vec![0, 1]),
        ] {
            assert_eq!(core_list(text), cores, "{text}");
        }
        assert_eq!(core_list("0-4294967295").len(), (1 << 16) + 1);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_panic(text in "[0-9a-zA-Z,:\\- \n\t]{0,80}", key in "[a-zA-Z]{0,6}") {
            let _ = (field(&text, &key), kilobytes(&text, &key), core_list(&text));
        }
    }
}
