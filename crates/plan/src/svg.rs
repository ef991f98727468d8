//! The elements of a picture as SVG.

use std::fmt::Write;

/// The text of a picture, element by element.
pub(crate) struct Svg {
    out: String,
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Svg {
        let (width, height) = (px(width), px(height));
        let mut svg = Svg { out: String::new() };
        let _ = writeln!(
            svg.out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\">"
        );
        let _ = writeln!(svg.out, "<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>");
        svg
    }

    pub fn text(&mut self, x: f64, y: f64, anchor: &str, size: u8, colour: &str, text: &str) {
        let (x, y) = (px(x), px(y));
        let _ = writeln!(
            self.out,
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{colour}\">{}</text>",
            escaped(text)
        );
    }

    pub fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], colour: &str, dashes: &str) {
        let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(px);
        let dashes = match dashes {
            "" => String::new(),
            dashes => format!(" stroke-dasharray=\"{dashes}\""),
        };
        let _ = writeln!(
            self.out,
            "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"{colour}\"{dashes}/>"
        );
    }

    pub fn rectangle(&mut self, place: [f64; 4], colour: &str) {
        let [x, y, width, height] = place.map(px);
        let _ = writeln!(
            self.out,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{colour}\"/>"
        );
    }

    /// An element that says what it is when it is pointed at.
    pub fn titled(&mut self, element: &str, attributes: &str, title: &str) {
        let _ = writeln!(self.out, "<{element} {attributes}><title>{}</title></{element}>", escaped(title));
    }

    pub fn open(&mut self, attributes: &str) {
        let _ = writeln!(self.out, "<g {attributes}>");
    }

    pub fn close(&mut self) {
        self.out.push_str("</g>\n");
    }

    pub fn finish(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }
}

/// Text as XML has it; characters that XML has none for become spaces.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A length with a decimal.
pub(crate) fn px(length: f64) -> String {
    let text = format!("{length:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_hold_no_markup_and_lengths_a_decimal() {
        assert_eq!(escaped("a<b> & \"c\"\u{1b}\n"), "a&lt;b&gt; &amp; &quot;c&quot;  ");
        assert_eq!([1.0, 0.25, -0.04, 12.34].map(px), ["1", "0.2", "-0", "12.3"]);
    }
}
