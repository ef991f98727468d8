//! The flags of `watch`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::monitor::address;

#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Folders of runs, as output.dir names them: of this machine or of any other that shares its files
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Serve a page for a browser instead: a port of 127.0.0.1 (0: any that is free), or an address and a port. Whoever asks another
    /// address than this machine's own needs the token that is printed
    #[arg(long, value_name = "ADDRESS", value_parser = address, conflicts_with_all = ["lines", "json"])]
    pub serve: Option<SocketAddr>,
    /// Print lines until the runs end, as where there is no terminal
    #[arg(long, conflicts_with = "json")]
    pub lines: bool,
    /// Print what is known now as one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}
