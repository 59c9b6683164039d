// SPDX-License-Identifier: AGPL-3.0-or-later
/** What a mistyped name was probably meant to be. Pure. */

/** Which of `words` `word` was probably meant to be; undefined = it resembles none. */
export const nearest = (word: string, words: Iterable<string>): string | undefined => {
  let best: string | undefined
  let least = Math.ceil(word.length / 2) + 1
  for (const candidate of words) {
    const far = distance(word, candidate)
    if (far < least) [best, least] = [candidate, far]
  }
  return best
}

/** Edits from one word to the other: insert, delete, replace, swap neighbours. */
const distance = (a: string, b: string): number => {
  let last: Array<number> = []
  let row = Array.from({ length: b.length + 1 }, (_, j) => j)
  for (let i = 1; i <= a.length; i++) {
    const next = [i]
    for (let j = 1; j <= b.length; j++) {
      const same = a[i - 1] === b[j - 1]
      const swapped = i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]
      next[j] = Math.min(
        row[j]! + 1,
        next[j - 1]! + 1,
        row[j - 1]! + (same ? 0 : 1),
        swapped ? last[j - 2]! + 1 : Number.POSITIVE_INFINITY
      )
    }
    last = row
    row = next
  }
  return row[b.length]!
}

/** `; did you mean X?`, or nothing. */
export const suggestion = (word: string, words: Iterable<string>): string => {
  const meant = nearest(word, words)
  return meant === undefined ? "" : `; did you mean ${meant}?`
}
