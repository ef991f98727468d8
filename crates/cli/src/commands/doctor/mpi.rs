//! What there is of MPI on this machine, by which ranks speak.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

/// What of MPI is here.
#[derive(Serialize)]
pub struct Mpi {
    /// Whether this program was built with it.
    built_in: bool,
    /// The library that it has loaded.
    library: Option<PathBuf>,
    /// The program that starts ranks.
    mpirun: Option<PathBuf>,
    /// What that says it is.
    version: Option<String>,
}

impl Mpi {
    pub fn of_this_machine() -> Mpi {
        let mpirun = in_path("mpirun");
        let said = mpirun.as_ref().and_then(|mpirun| Command::new(mpirun).arg("--version").output().ok());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Mpi {
            built_in: cfg!(feature = "mpi"),
            library: library(&maps),
            version: said.and_then(|said| version(&String::from_utf8_lossy(&said.stdout))),
            mpirun,
        }
    }

    /// For people, in lines.
    pub fn lines(&self) -> [String; 2] {
        let library = match (self.built_in, &self.library) {
            (false, _) => {
                "this program was built without it: `cargo build --release --features mpi` (docs/ranks.md)"
                    .to_owned()
            }
            (true, None) => "this program was built with it".to_owned(),
            (true, Some(library)) => format!("this program was built with it, {}", library.display()),
        };
        let mpirun = match (&self.mpirun, &self.version) {
            (None, _) => "no mpirun in PATH: `apt-get install openmpi-bin` on Debian and Ubuntu".to_owned(),
            (Some(mpirun), None) => mpirun.display().to_string(),
            (Some(mpirun), Some(version)) => format!("{}, {version}", mpirun.display()),
        };
        [library, mpirun]
    }
}

/// Where a program is that a shell would find.
fn in_path(program: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// The library among the files that a process has mapped: `libmpi.so.40` of Open MPI, `libmpich.so.12` of MPICH.
fn library(maps: &str) -> Option<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').and_then(|start| line.get(start..)));
    let is_mpi = |path: &&str| {
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
        ["libmpi.so", "libmpich.so"].iter().any(|library| name.starts_with(library))
    };
    paths.into_iter().find(is_mpi).map(PathBuf::from)
}

/// What `mpirun --version` says: Open MPI in its first line, MPICH in one of several.
fn version(said: &str) -> Option<String> {
    let first = said.lines().map(str::trim).find(|line| !line.is_empty())?;
    let number = said.lines().find_map(|line| line.trim().strip_prefix("Version:"));
    Some(match number {
        Some(number) if first.starts_with("HYDRA") => format!("MPICH {}", number.trim()),
        _ => first.trim_start_matches("mpirun ").replace(['(', ')'], ""),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_versions_are_told() {
        let open = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n";
        assert_eq!(version(open).unwrap(), "Open MPI 4.1.4");
        let mpich =
            "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: x\n";
        assert_eq!(version(mpich).unwrap(), "MPICH 4.0.2");
        assert_eq!(version(""), None);

        let maps = "55 r-xp 00 08:01 1 /opt/plimsoll\n7f r--p 00 08:01 2 /usr/lib/libmpi_mpifh.so.40\n\
                    7f r--p 00 08:01 3 /usr/lib/libmpi.so.40.30.4\n7f rw-p 00 00:00 0\n";
        assert_eq!(library(maps), Some(PathBuf::from("/usr/lib/libmpi.so.40.30.4")));
        assert_eq!(library("55 r-xp 00 08:01 1 /libmpi.so/plimsoll\n"), None);
    }
}
