//! Tiers with what was planned and measured, their I/O with the share that nobody waited for, and ranks.

use plimsoll_memory::ByteSize;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget, Wrap};

use super::{Look, Panel, titled};
use crate::view::View;

pub fn draw(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let below = titled(buffer, area, Panel::Tiers, Vec::new(), look);
    let lines: Vec<Line<'_>> = lines(view, look);
    let indented = Rect { x: below.x + 1, width: below.width.saturating_sub(1), ..below };
    Paragraph::new(lines).wrap(Wrap { trim: true }).render(indented, buffer);
}

/// A line for the tiers, one for I/O where there is any, and one for the ranks of several.
pub fn lines<'a>(view: &View, look: &Look) -> Vec<Line<'a>> {
    let mut lines = Vec::new();
    let tiers: Vec<String> = view
        .tiers()
        .iter()
        .map(|tier| {
            let measured = tier.measured.map_or("–".to_owned(), |bytes| ByteSize(bytes).to_string());
            match tier.planned {
                Some(planned) if Some(planned) == tier.measured => {
                    format!("{} {measured} as planned", tier.name)
                }
                Some(planned) => format!("{} {measured} of {} planned", tier.name, ByteSize(planned)),
                None => format!("{} {measured}", tier.name),
            }
        })
        .collect();
    if !tiers.is_empty() {
        lines.push(Line::from(tiers.join("   ")));
    }
    if let Some(io) = view.last.as_ref().and_then(|last| last.io) {
        let hidden =
            |share: Option<f64>| share.map_or("–".to_owned(), |share| format!("{:.0} %", 100.0 * share));
        lines.push(Line::from(vec![
            Span::raw(format!(
                "I/O of a step: {} read, {} written; ",
                ByteSize(io.bytes_read),
                ByteSize(io.bytes_written)
            )),
            Span::styled(format!("{} hidden", hidden(io.hidden_share)), look.colours.accent()),
            Span::raw(format!(" (all steps {})", hidden(view.io.hidden_share()))),
        ]));
    }
    let ranks = view.last.as_ref().map_or(&[][..], |last| last.ranks_rss_bytes.as_slice());
    if !ranks.is_empty() {
        let each = ranks.iter().enumerate().map(|(rank, bytes)| format!("{rank}: {}", ByteSize(*bytes)));
        let each: Vec<String> = each.take(64).collect();
        lines.push(Line::from(format!("{} ranks   {}", ranks.len(), each.join("   "))));
    }
    lines
}
