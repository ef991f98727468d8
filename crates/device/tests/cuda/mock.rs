//! A driver library without a GPU, made of `driver.cpp`, `on_cpu.h` and the kernels by the system's C++ compiler; and NCCL, of `nccl.cpp`.
//!
//! Where that cannot be, the reason is printed and what needs it is skipped.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use plimsoll_device::cuda::{SOURCES, SOURCES_80, SOURCES_90};

/// Exact arithmetic, as the kernels ask for it; aliasing as NVRTC has it.
const FLAGS: [&str; 7] =
    ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-pthread"];

/// What this machine can do beside: 16-bit floats in one instruction, more sums at once, all with the same bits.
fn own_flags() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        return &["-mavx2", "-mf16c"];
    }
    &[]
}

/// The library, named as drivers name it, in a folder of its own. It is made once for the sources as they are.
pub fn library() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = MADE.get_or_init(|| make().inspect_err(|why| eprintln!("skipped, without a GPU: {why}")).ok());
    made.as_deref()
}

fn make() -> Result<PathBuf, String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("kernels run on the CPU only under Linux on x86-64".to_owned());
    }
    let parts = SOURCES.iter().chain(&SOURCES_80).chain(&SOURCES_90).map(|(_, source)| *source);
    let parts = [include_str!("on_cpu.h")].into_iter().chain(parts).chain([include_str!("driver.cpp")]);
    let source: String = parts.flat_map(|part| [part, "\n"]).collect();
    let flags = [&FLAGS[..], own_flags()].concat();
    let mut hasher = DefaultHasher::new();
    (&source, &flags).hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{:016x}", hasher.finish()));
    let library = folder.join("libcuda.so.1");
    compile(&source, &flags, &[], library)
}

/// NCCL without a GPU, in a folder of its own too, for the driver that there is.
#[allow(dead_code)]
pub fn nccl() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let driver = library()?;
    let made = MADE.get_or_init(|| {
        let source = include_str!("nccl.cpp");
        let mut hasher = DefaultHasher::new();
        (source, driver).hash(&mut hasher);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{:016x}", hasher.finish()));
        let beside = driver.parent()?.display();
        let with = [format!("-L{beside}"), "-l:libcuda.so.1".to_owned(), format!("-Wl,-rpath,{beside}")];
        let made = compile(source, &FLAGS, &with, folder.join("libnccl.so.2"));
        made.inspect_err(|why| eprintln!("skipped, without NCCL: {why}")).ok()
    });
    made.as_deref()
}

fn compile(source: &str, flags: &[&str], with: &[String], library: PathBuf) -> Result<PathBuf, String> {
    if library.exists() {
        return Ok(library);
    }
    // Several tests may make it at the same time.
    let (own, words) = (std::process::id(), |error: std::io::Error| error.to_string());
    let folder = library.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(words)?;
    let (written, made) = (folder.join(format!("{own}.cpp")), folder.join(format!("{own}.so")));
    std::fs::write(&written, source).map_err(words)?;
    let compiled = Command::new("c++").args(flags).arg("-o").arg(&made).arg(&written).args(with).output();
    let compiled = compiled.map_err(|error| format!("no C++ compiler: {error}"))?;
    if !compiled.status.success() {
        panic!("{} does not compile:\n{}", library.display(), String::from_utf8_lossy(&compiled.stderr));
    }
    std::fs::rename(&made, &library).map_err(words)?;
    Ok(library)
}
