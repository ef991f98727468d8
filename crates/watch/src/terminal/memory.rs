//! Memory by owner over time, below the load line.

use plimsoll_memory::ByteSize;
use plimsoll_monitor::Status;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Span;

use super::{Look, Panel, stack, status_words, titled};
use crate::band::{Held, Moment};
use crate::view::View;

/// Columns of a column of the legend.
const LEGEND: u16 = 27;
/// Columns that a picture has at least.
const LEAST: u16 = 16;

pub fn draw(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let area = titled(buffer, area, Panel::Memory, title(view, look), look);
    let moments = view.moments(look.window());
    if area.height == 0 {
        return;
    }
    if moments.is_empty() {
        if view.last.is_none() {
            return;
        }
        let words = "no flight recorder in this folder: memory by owner is not known";
        buffer.set_stringn(area.x + 1, area.y, words, usize::from(area.width), look.colours.faint());
        return;
    }
    let now = view.band.last().map_or(Vec::new(), |moment| moment.by_kind.clone());
    let most = (area.width.saturating_sub(LEAST) / LEGEND).min(3);
    let columns_of_legend = (now.len().div_ceil(usize::from(area.height)) as u16).min(most);
    let legend = columns_of_legend * LEGEND;
    let plot = Rect { width: area.width - legend, ..area };
    let line = view.line_bytes();
    let highest = moments.iter().map(|moment| moment.total()).max().unwrap_or(0);
    // Where little of the line is used the picture shows what is used.
    let near = line.filter(|line| *line <= highest.saturating_mul(3));
    let top = near.unwrap_or(0).max(highest.saturating_add(highest / 20)).max(1);
    let columns: Vec<Vec<stack::Layer>> = moments.iter().map(|moment| layers(moment)).collect();
    let fitted = stack::fitted(&columns, usize::from(plot.width));
    stack::draw(buffer, plot, &fitted, top, look.colours);
    if let Some(line) = near {
        stack::line(buffer, plot, line, top, look.colours.line());
    }
    let right = Rect { x: plot.right() + 1, width: legend.saturating_sub(1), ..area };
    draw_legend(buffer, right, &now, usize::from(columns_of_legend * area.height), look);
}

fn number_of(kind: Held) -> usize {
    Held::all().position(|own| own == kind).unwrap_or(0)
}

fn layers(moment: &Moment) -> Vec<stack::Layer> {
    moment.by_kind.iter().map(|(kind, bytes)| (number_of(*kind), kind.colour(), *bytes)).collect()
}

/// What is there now, from the top of the picture to its bottom; the smallest are one where there is no room.
fn draw_legend(buffer: &mut Buffer, area: Rect, now: &[(Held, u64)], room: usize, look: &Look) {
    let rows = usize::from(area.height);
    let mut shown: Vec<(Held, u64)> = now.iter().rev().copied().collect();
    if shown.len() > room {
        let mut sizes: Vec<u64> = shown.iter().map(|(_, bytes)| *bytes).collect();
        sizes.sort_unstable();
        let least = sizes.get((sizes.len() + 1).saturating_sub(room)).copied().unwrap_or(u64::MAX);
        let rest = shown.iter().filter(|(_, bytes)| *bytes < least).map(|(_, bytes)| *bytes);
        let rest = rest.fold(0, u64::saturating_add);
        shown.retain(|(_, bytes)| *bytes >= least);
        shown.truncate(room.saturating_sub(1));
        shown.push((Held::Other, rest));
    }
    for (place, (kind, bytes)) in shown.iter().enumerate() {
        let (column, row) = ((place / rows) as u16, (place % rows) as u16);
        let (x, y) = (area.x + column * LEGEND, area.y + row);
        if x >= area.right() {
            return;
        }
        let (symbol, style) = stack::swatch(number_of(*kind), kind.colour(), look.colours);
        buffer.set_stringn(x, y, symbol, 1, style);
        let words = format!("{:<13.13} {:>10}", kind.words(), ByteSize(*bytes).to_string());
        buffer.set_stringn(x + 2, y, words, usize::from(LEGEND - 3), Style::new());
    }
}

fn title<'a>(view: &View, look: &Look) -> Vec<Span<'a>> {
    let mut spans = Vec::new();
    let (rss, line) = (view.rss_bytes(), view.line_bytes());
    match (rss, line) {
        (Some(rss), Some(line)) => {
            let share = 100.0 * rss as f64 / line.max(1) as f64;
            spans.push(Span::raw(format!("{} of {} ({share:.0} %) ", ByteSize(rss), ByteSize(line))));
            spans.push(Span::styled("─ load line ", look.colours.line()));
        }
        (Some(rss), None) => spans.push(Span::raw(format!("{} ", ByteSize(rss)))),
        _ => {}
    }
    spans.push(status_words(view.status(), look));
    let health = view.last.as_ref().map(|last| last.memory.health);
    if let Some(steps) = health.and_then(|health| health.forecast_steps) {
        spans.push(Span::styled(format!(" line in {steps} steps"), look.colours.of_status(Status::Warning)));
    }
    if let Some(planned) = view.planned_process_bytes() {
        spans.push(Span::raw(format!("  planned {}", ByteSize(planned))));
    }
    spans
}
