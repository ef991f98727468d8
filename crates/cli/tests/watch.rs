//! Runs that are watched: on a terminal that a test plays, in a browser's words over the loopback, and as lines.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{folder, ok, plimsoll, text};
use rustix::process::{Pid, Signal, kill_process};

/// Whatever a busy machine does, this is enough.
const PATIENCE: Duration = Duration::from_secs(240);

fn command(folder: &std::path::Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder).args(arguments);
    for variable in ["NO_COLOR", "COLORTERM"] {
        command.env_remove(variable);
    }
    command
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

mod server {
    use super::*;

    /// A server that ends with its test.
    pub struct Server {
        child: Child,
        pub address: String,
        pub query: String,
    }

    impl Server {
        pub fn of(folder: &std::path::Path, at: &str) -> Server {
            let mut child = command(folder, &["watch", "out", "out", "--serve", at])
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let (mut said, mut byte) = (String::new(), [0]);
            while !said.ends_with('\n') && child.stdout.as_mut().unwrap().read(&mut byte).unwrap() > 0 {
                said.push(char::from(byte[0]));
            }
            let url = said.trim().strip_prefix("http://").unwrap_or_else(|| panic!("{said}")).to_owned();
            let (address, query) = url.split_once('/').unwrap();
            let address = address.replace("0.0.0.0", "127.0.0.1");
            Server { child, address, query: query.to_owned() }
        }

        pub fn raw(&self, request: &[u8]) -> String {
            let mut client = TcpStream::connect(&self.address).unwrap();
            // A server may answer before it has read everything.
            let _ = client.write_all(request);
            let _ = client.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer);
            text(&answer)
        }

        pub fn get(&self, target: &str, header: &str) -> String {
            self.raw(format!("GET {target} HTTP/1.1\r\nHost: {}\r\n{header}\r\n", self.address).as_bytes())
        }

        pub fn end(mut self) -> Option<i32> {
            send(&self.child, Signal::TERM);
            self.child.wait().unwrap().code()
        }
    }

    fn status(answer: &str) -> &str {
        answer.split(' ').nth(1).unwrap_or("none")
    }

    #[test]
    fn runs_are_a_page_on_the_loopback_and_nothing_else_is() {
        let folder = folder();
        ok(folder.path(), &["train", "c.yaml"]);
        let server = Server::of(folder.path(), "127.0.0.1:0");
        assert_eq!(server.query, "");
        let page = server.get("/", "");
        assert!(
            page.starts_with("HTTP/1.1 200 OK")
                && page.contains("Content-Security-Policy: default-src 'none'"),
            "{page}"
        );
        let begun = Instant::now();
        // The plan is made on the side.
        let shown = loop {
            let shown = server.get("/runs?window=1000", "");
            assert!(shown.starts_with("HTTP/1.1 200 OK"), "{shown}");
            if shown.matches("Memory through the step").count() == 2 || begun.elapsed() > PATIENCE {
                break shown;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        assert_eq!(shown.matches("<article").count(), 2);
        for said in
            ["finished", "Memory by owner", "Memory through the step", "checkpoint-4", "Learning rate"]
        {
            assert!(shown.contains(said), "{said} is not in {shown}");
        }
        let json = server.get("/runs.json", "");
        let document: serde_json::Value =
            serde_json::from_str(json.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_eq!(
            (&document["runs"][1]["state"], &document["runs"][0]["steps"]),
            (&"finished".into(), &4.into())
        );
        for (target, said) in [
            ("/metrics.jsonl", "404"),
            ("/../../../../etc/passwd", "404"),
            ("/out/plimsoll.yaml", "404"),
            ("/%2e%2e/out", "404"),
            ("/runs?window=-1", "400"),
            ("/runs?window=x", "400"),
            ("runs", "400"),
            ("http://127.0.0.1/", "400"),
        ] {
            assert_eq!(status(&server.get(target, "")), said, "{target}");
        }
        for (request, said) in [
            (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), "405"),
            (b"GET / HTTP/1.1\r\nHost: rebound.example\r\n\r\n".to_vec(), "421"),
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "421"),
            (b"GET / HTTP/1.1\r\nHost: local".to_vec(), "400"),
            (b"\x16\x03\x01\x02\x00\r\n\r\n".to_vec(), "400"),
            (b"\xff\xfe\r\n\r\n".to_vec(), "400"),
            ([b"GET / HTTP/1.1\r\nX: ".as_slice(), &[b'x'; 40_000]].concat(), "431"),
        ] {
            let answer = server.raw(&request);
            // A request that is cut off while it is sent may be answered by nothing but an end.
            assert!(status(&answer) == said || (said == "431" && answer.is_empty()), "{said}: {answer}");
        }
        // Whoever says nothing holds nobody up.
        let silent: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
        assert_eq!(status(&server.get("/", "")), "200");
        drop(silent);
        assert_eq!(server.end(), Some(143));
    }

    #[test]
    fn who_is_elsewhere_needs_the_token() {
        let folder = folder();
        ok(folder.path(), &["train", "c.yaml"]);
        let server = Server::of(folder.path(), "0.0.0.0:0");
        let token = server.query.strip_prefix("?token=").unwrap().to_owned();
        assert_eq!(token.len(), 32);
        for target in ["/", "/runs", "/runs.json", "/?token=", "/?token=0123456789abcdef0123456789abcdef"] {
            assert_eq!(status(&server.get(target, "")), "401", "{target}");
        }
        assert_eq!(status(&server.get(&format!("/?token={token}"), "")), "200");
        assert_eq!(status(&server.get("/runs", &format!("Authorization: Bearer {token}\r\n"))), "200");
        assert_eq!(status(&server.get("/runs", "Authorization: Bearer x\r\n")), "401");
        server.end();
    }
}

#[cfg(target_os = "linux")]
mod on_a_terminal {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Receiver, channel};

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
    use signal_hook::flag::register_conditional_default;

    use super::*;

    /// A program on a terminal of 80 x 24.
    struct Session {
        child: Child,
        ours: File,
        theirs: File,
        output: Receiver<Vec<u8>>,
        said: String,
        cells: Cells,
    }

    /// What the terminal shows: pictures are told cell by cell, and what is the same as before is left out.
    struct Cells {
        rows: Vec<Vec<char>>,
        place: (usize, usize),
        /// The beginning of a sequence whose end has not come yet.
        partial: String,
    }

    impl Cells {
        fn new() -> Cells {
            Cells { rows: vec![vec![' '; 80]; 24], place: (0, 0), partial: String::new() }
        }

        fn feed(&mut self, text: &str) {
            for c in text.chars() {
                if c == '\u{1b}' || !self.partial.is_empty() {
                    self.partial.push(c);
                    if self.partial.len() > 2 && c.is_ascii_alphabetic() {
                        let sequence = std::mem::take(&mut self.partial);
                        self.control(&sequence);
                    }
                    continue;
                }
                match c {
                    '\r' => self.place.1 = 0,
                    '\n' => self.place.0 = (self.place.0 + 1).min(23),
                    _ => {
                        if let Some(cell) = self.rows[self.place.0].get_mut(self.place.1) {
                            *cell = c;
                        }
                        self.place.1 += 1;
                    }
                }
            }
        }

        fn control(&mut self, sequence: &str) {
            let numbers = sequence.trim_start_matches("\u{1b}[").trim_end_matches('H');
            if sequence == "\u{1b}[?1049h" || sequence.ends_with('J') {
                self.rows = Cells::new().rows;
            } else if sequence.ends_with('H') {
                let (row, column) = numbers.split_once(';').unwrap_or(("1", "1"));
                let number = |text: &str| text.parse::<usize>().unwrap_or(1).saturating_sub(1);
                self.place = (number(row).min(23), number(column));
            }
        }

        fn show(&self, words: &str) -> bool {
            self.rows.iter().any(|row| row.iter().collect::<String>().contains(words))
        }
    }

    impl Session {
        fn begin(folder: &std::path::Path, arguments: &[&str]) -> Session {
            let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
            grantpt(&ours).unwrap();
            unlockpt(&ours).unwrap();
            let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
            tcsetwinsize(&ours, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
            let theirs = File::options().read(true).write(true).open(name).unwrap();
            let stdio = || Stdio::from(OwnedFd::from(theirs.try_clone().unwrap()));
            // Whoever started the tests may ignore signals (`nohup`), and children would, too: what is handled here is not ignored there.
            for signal in [Signal::INT, Signal::HUP, Signal::TERM] {
                register_conditional_default(signal.as_raw(), Arc::new(AtomicBool::new(true))).unwrap();
            }
            let mut command = command(folder, arguments);
            command.env("TERM", "xterm-256color").stdin(stdio()).stdout(stdio()).stderr(stdio());
            let child = command.spawn().unwrap();
            let ours = File::from(ours);
            let (give, output) = channel();
            let mut reader = ours.try_clone().unwrap();
            std::thread::spawn(move || {
                let (mut piece, mut bytes) = ([0; 4096], Vec::new());
                while let Ok(length) = reader.read(&mut piece) {
                    bytes.extend_from_slice(&piece[..length]);
                    // The end of a character may come with the next piece.
                    let whole =
                        std::str::from_utf8(&bytes).map_or_else(|error| error.valid_up_to(), str::len);
                    let rest = bytes.split_off(whole);
                    if length == 0 || give.send(std::mem::replace(&mut bytes, rest)).is_err() {
                        return;
                    }
                }
            });
            Session { child, ours, theirs, output, said: String::new(), cells: Cells::new() }
        }

        /// The same; waits until the dashboard is there, behind whatever was said before.
        fn shown(folder: &std::path::Path, arguments: &[&str]) -> Session {
            let mut session = Session::begin(folder, arguments);
            session.wait_for("\u{1b}[?1049h");
            session.see("─ load line");
            session
        }

        fn press(&mut self, keys: &str) {
            self.ours.write_all(keys.as_bytes()).unwrap();
        }

        fn take(&mut self, end: Instant, words: &str) {
            match self.output.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(piece) => {
                    let piece = text(&piece);
                    self.cells.feed(&piece);
                    self.said.push_str(&piece);
                }
                Err(error) => panic!("{words:?} was not said ({error}); the last was {:?}", self.said),
            }
        }

        /// Waits until something is said after what was waited for before.
        fn wait_for(&mut self, words: &str) {
            let end = Instant::now() + PATIENCE;
            loop {
                if let Some(at) = self.said.find(words) {
                    self.said.drain(..at + words.len());
                    return;
                }
                self.take(end, words);
            }
        }

        /// Waits until the picture shows something.
        fn see(&mut self, words: &str) {
            let end = Instant::now() + PATIENCE;
            while !self.cells.show(words) {
                self.take(end, words);
            }
        }

        /// Waits for the end, and sees that the terminal is as it was. The exit code, and what was said then.
        fn end(mut self) -> (Option<i32>, String) {
            // Left and shown again, in this order.
            self.wait_for("\u{1b}[?1049l");
            self.wait_for("\u{1b}[?25h");
            let code = self.child.wait().unwrap().code();
            let modes = tcgetattr(&self.theirs).unwrap().local_modes;
            assert!(modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG), "{modes:?}");
            drop(self.theirs);
            while let Ok(piece) = self.output.recv_timeout(Duration::from_secs(1)) {
                self.said.push_str(&String::from_utf8_lossy(&piece));
            }
            (code, self.said)
        }
    }

    const LONG: [&str; 5] = ["train", "c.yaml", "--dashboard", "--set", "training.steps=10000000"];

    #[test]
    fn keys_look_at_a_run_and_leave_the_terminal_as_it_was() {
        let folder = folder();
        ok(folder.path(), &["train", "c.yaml"]);
        let mut session = Session::begin(folder.path(), &["watch", "out"]);
        session.wait_for("\u{1b}[?1049h");
        session.see("finished");
        session.see("step 4/4");
        session.press("p");
        session.see("PAUSED");
        session.press("?");
        session.see("leave; the run goes on");
        session.press("x+");
        session.see("last 1000 steps");
        session.press("q");
        assert_eq!(session.end().0, Some(0));
    }

    #[test]
    fn whoever_trains_is_asked_and_the_run_stops_with_a_checkpoint() {
        let folder = folder();
        let mut session = Session::shown(folder.path(), &LONG);
        session.press("q");
        session.see("what is to become of the run?");
        session.press("s");
        let (code, said) = session.end();
        assert_eq!(code, Some(130), "{said}");
        for words in
            ["asked to stop: saving after step", "saved out/checkpoint-", "stopped: ", "everything is in out"]
        {
            assert!(said.contains(words), "{words} is not in {said}");
        }
    }

    #[test]
    fn a_dashboard_that_is_left_goes_on_in_lines() {
        let folder = folder();
        let mut session = Session::shown(folder.path(), &LONG);
        session.press("ql");
        session.wait_for("\u{1b}[?1049l");
        session.wait_for("tokens/s  memory");
        send(&session.child, Signal::TERM);
        session.wait_for("asked to stop");
        assert_eq!(session.child.wait().unwrap().code(), Some(143));
    }

    #[test]
    fn signals_give_the_terminal_back() {
        let folder = folder();
        for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
            let set = format!("output.dir=of{code}");
            let arguments = [&LONG[..], &["--set", &set]].concat();
            let session = Session::shown(folder.path(), &arguments);
            send(&session.child, signal);
            assert_eq!(session.end().0, Some(code));
        }
        // The second one may come while the run is being saved, which ends the program at once, or behind that.
        let arguments = [&LONG[..], &["--set", "output.dir=twice"]].concat();
        let session = Session::shown(folder.path(), &arguments);
        (0..2).for_each(|_| send(&session.child, Signal::INT));
        assert_eq!(session.end().0, Some(130));
        let mut session = Session::begin(folder.path(), &["watch", "of143"]);
        session.see("stopped");
        send(&session.child, Signal::TERM);
        assert_eq!(session.end().0, Some(143));
    }

    #[test]
    fn ctrl_c_is_a_key_that_stops_the_run() {
        let folder = folder();
        let mut session = Session::shown(folder.path(), &LONG);
        session.press("\u{3}");
        let (code, said) = session.end();
        assert_eq!(code, Some(130));
        assert!(said.contains("everything is in out"), "{said}");
    }
}

#[test]
fn off_a_terminal_there_are_lines() {
    let folder = folder();
    let said = ok(folder.path(), &["train", "c.yaml", "--dashboard"]);
    assert!(said.contains("step 4/4") && !said.contains('\u{1b}'), "{said}");
    for words in ["finished: 4 steps, 96 tokens, in ", "\nloss ", "plimsoll report out -o report.html"] {
        assert!(said.contains(words), "{words} is not in {said}");
    }
    for arguments in [&["watch", "out"][..], &["watch", "out", "--lines"]] {
        let said = ok(folder.path(), arguments);
        assert!(said.contains("step 4/4  loss ") && said.contains("saved out/checkpoint-4"), "{said}");
        assert!(said.ends_with("the run: finished\n") && !said.contains('\u{1b}'), "{said}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&ok(folder.path(), &["watch", "out", "--json"])).unwrap();
    let run = &json["runs"][0];
    assert_eq!(
        (&run["state"], &run["of_steps"], &run["last"]["step"]),
        (&"finished".into(), &4.into(), &4.into())
    );
    assert!(run["plan"]["device_bytes"] == run["last"]["memory"]["device_peak_bytes"], "{run}");
    assert!(run["memory"]["owners"].as_array().is_some_and(|owners| !owners.is_empty()), "{run}");
}

#[test]
fn what_is_no_run_is_said_with_its_remedy() {
    let folder = folder();
    for name in ["nowhere", ".", "c.yaml"] {
        let Output { status, stderr, .. } = plimsoll(folder.path(), &["watch", name]);
        assert_eq!(status.code(), Some(2));
        assert!(text(&stderr).contains("output.dir"), "{}", text(&stderr));
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    ok(folder.path(), &["train", "c.yaml"]);
    let Output { status, stderr, .. } = plimsoll(folder.path(), &["watch", "out", "--serve", &address]);
    assert_eq!(status.code(), Some(1));
    assert!(text(&stderr).contains("a port that is free"), "{}", text(&stderr));
}
