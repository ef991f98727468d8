//! Plain tables: columns padded to their widest cell, the first to the left, the others to the right.

/// Prints rows under no heading; an empty first row is a blank line.
pub fn render(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            match column {
                0 => line.push_str(&format!("  {cell}{pad}")),
                _ => line.push_str(&format!("  {pad}{cell}")),
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// A row of texts.
#[macro_export]
macro_rules! row {
    ($($cell:expr),* $(,)?) => { vec![$($cell.to_string()),*] };
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_line_up() {
        let rows = [crate::row!["weights", "513.1 MiB"], crate::row!["all", "4.00 GiB", "x"]];
        assert_eq!(super::render(&rows), "  weights  513.1 MiB\n  all       4.00 GiB  x\n");
    }
}
