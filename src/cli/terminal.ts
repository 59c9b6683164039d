// SPDX-License-Identifier: AGPL-3.0-or-later
/** Text of strangers on a terminal: what would steer it stays text. Pure. */

/** Controls (C0 but for line feed and tab, DEL, C1) and marks that turn the direction of text. */
const steering = /[\p{Cc}\u2028-\u202e\u2066-\u2069]/gu

/** Many lines. */
export const printable = (text: string): string =>
  text.replace(steering, (mark) => (mark === "\n" || mark === "\t" ? mark : "\uFFFD"))

/** One line. */
export const oneLine = (text: string): string => text.replace(steering, "\uFFFD")

/** One line of JSON; the marks are escaped, so that a reader gets them back. */
export const jsonLine = (value: unknown): string =>
  JSON.stringify(value).replace(
    steering,
    (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`
  )
