//! The keys: the most used in the last row, all of them on request; and the question what is to become of a run.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Widget};

use super::Look;

pub fn footer(buffer: &mut Buffer, area: Rect, look: &Look, runs: usize) {
    let zoom = look.window().map_or("all steps".to_owned(), |window| format!("last {window} steps"));
    let keys = [
        ("q", "quit".to_owned()),
        ("p", if look.paused { "go on" } else { "pause" }.to_owned()),
        ("+/-", zoom),
        ("1-7", if look.panel.is_some() { "panel, 0 all" } else { "enlarge" }.to_owned()),
        ("Tab", "next run".to_owned()),
        ("?", "help".to_owned()),
    ];
    let shown = keys.into_iter().filter(|(key, _)| *key != "Tab" || runs > 1);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let spans: Vec<Span<'_>> = shown
        .flat_map(|(key, words)| {
            [Span::styled(format!(" {key} "), bold), Span::styled(format!("{words} "), look.colours.faint())]
        })
        .collect();
    Line::from(spans).render(area, buffer);
}

pub fn keys(buffer: &mut Buffer, area: Rect, look: &Look) {
    let quit = match look.trains {
        true => "asks: stop the run, or leave this view",
        false => "leave; the run goes on",
    };
    let ctrl_c = match look.trains {
        true => "stop the run with a checkpoint; again: at once",
        false => "leave; the run goes on",
    };
    let lines = [
        ("p, space", "pause the view; the run goes on"),
        ("+ -", "zoom: all steps, or the last 1000 to 10"),
        ("1 to 7", "one panel alone; the same key or 0: all"),
        ("Tab", "the next of several runs"),
        ("q", quit),
        ("Ctrl-C", ctrl_c),
        ("", ""),
        ("o", "the loss of a validation"),
        ("step", "memory through the step, as planned"),
        ("memory", "who holds it, by the flight recorder"),
        ("hidden", "I/O behind which nobody waited"),
    ];
    let lines = lines.map(|(key, words)| format!(" {key:<9} {words}"));
    boxed(buffer, area, " keys ", &lines);
}

pub fn question(buffer: &mut Buffer, area: Rect) {
    let lines = [
        " s    save a checkpoint and stop the run",
        " l    leave this view; the run goes on in lines",
        " Esc  back",
    ];
    boxed(buffer, area, " what is to become of the run? ", &lines.map(str::to_owned));
}

fn boxed(buffer: &mut Buffer, area: Rect, title: &str, lines: &[String]) {
    let widest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0).max(title.len());
    let (width, height) = ((widest as u16 + 3).min(area.width), (lines.len() as u16 + 2).min(area.height));
    let place =
        Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    Clear.render(place, buffer);
    let text: Vec<Line<'_>> = lines.iter().map(|line| Line::from(line.as_str())).collect();
    Paragraph::new(text).block(Block::bordered().title(title)).render(place, buffer);
}
