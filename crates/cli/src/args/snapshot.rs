//! The flags of `snapshot`.

use std::path::PathBuf;

use clap::Args;
use plimsoll_memory::ByteSize;

#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// File that torch.cuda.memory._dump_snapshot wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Device to look at; by default the one with the highest peak
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    /// Memory that reading the file may take
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    pub memory: ByteSize,
    /// Write a page for a browser to this file, for example snapshot.html
    #[arg(long, value_name = "PAGE")]
    pub html: Option<PathBuf>,
    /// Print everything as one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}
