//! SentencePiece's compiled character map: the length of a double array in bytes, the array (a trie over
//! UTF-8, little endian u32, as `darts-clone` writes it), and the replacements, each ended by a zero byte.
//!
//! The engine walks the array without looking where an entry leads; a map from a stranger is walked here first.

/// A unit leads to a value, not to a child, where this is set.
const IS_VALUE: u32 = 1 << 31;

/// Says what is wrong with a map: its length, an entry that leads out of it, a replacement that is no text.
pub fn check(map: &[u8]) -> Result<(), String> {
    let (size, rest) = map.split_first_chunk::<4>().ok_or("it is shorter than its length field")?;
    let size = u32::from_le_bytes(*size) as usize;
    let (array, texts) = rest.split_at_checked(size).ok_or_else(|| {
        format!("the array should have {size} bytes, and {} are left in the file", rest.len())
    })?;
    if !size.is_multiple_of(4) || size == 0 {
        return Err(format!("the array has {size} bytes, which is no whole number of u32"));
    }
    let texts = std::str::from_utf8(texts).map_err(|e| format!("a replacement is no UTF-8: {e}"))?;
    let units: Vec<u32> = array.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    walk(&units, texts)
}

fn walk(units: &[u32], texts: &str) -> Result<(), String> {
    let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
    let mut seen = vec![false; units.len()];
    let mut waiting = vec![0usize];
    while let Some(at) = waiting.pop() {
        let outside = || format!("entry {at} of the array leads out of it");
        if std::mem::replace(seen.get_mut(at).ok_or_else(outside)?, true) {
            continue;
        }
        let unit = units.get(at).copied().ok_or_else(outside)?;
        // The engine takes any byte from here, so that all 256 places must exist.
        let base = at ^ offset(unit);
        let children = units.get(base & !0xff..=(base | 0xff)).ok_or_else(outside)?;
        let child = |byte: usize| children.get((base & 0xff) ^ byte).copied();
        if at != 0 && unit & (1 << 8) != 0 {
            let start = (child(0).ok_or_else(outside)? & !IS_VALUE) as usize;
            if !texts.is_char_boundary(start) {
                return Err(format!("entry {at} of the array points into no replacement"));
            }
        }
        for byte in 1..=255u8 {
            if child(usize::from(byte)).is_some_and(|u| u & (IS_VALUE | 0xff) == u32::from(byte)) {
                waiting.push(base ^ usize::from(byte));
            }
        }
    }
    Ok(())
}

/// Standard base64 with padding (RFC 4648).
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group =
            chunk.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let digit = DIGITS[(group >> (18 - 6 * place) & 63) as usize];
            text.push(if place > chunk.len() { '=' } else { char::from(digit) });
        }
    }
    text
}
