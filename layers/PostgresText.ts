// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Text and JSON as PostgreSQL can keep them. It has no NUL in text and no lone surrogates in jsonb
 * (SQLSTATE 22021, 22P05), but mail has both: octets go into bytea untouched, and what is read from
 * them is cleaned here before it goes into text, in writes and in lookups alike. Pure.
 */

/** Without NUL; lone surrogates become U+FFFD. */
export const clean = (text: string): string => {
  const whole = text.isWellFormed() ? text : text.toWellFormed()
  return whole.includes("\0") ? whole.replaceAll("\0", "") : whole
}

/** The same for a column that may be NULL. */
export const cleanOrNull = (text: string | null): string | null =>
  text === null ? null : clean(text)

const cleanValue = (value: unknown): unknown => {
  if (typeof value === "string") return clean(value)
  if (Array.isArray(value)) return value.map(cleanValue)
  if (typeof value !== "object" || value === null) return value
  const entries = Object.entries(value).map(([key, inner]) => [clean(key), cleanValue(inner)])
  return Object.fromEntries(entries)
}

/** JSON.stringify writes both kinds of bad characters as escapes; a "\\u0000" is only suspected. */
const suspicious = /\\u0000|\\ud[89a-f]/

/** JSON text that jsonb takes. A second pass is made only where the first looks suspicious. */
export const json = (value: unknown): string => {
  const text = JSON.stringify(value)
  return suspicious.test(text) ? JSON.stringify(cleanValue(value)) : text
}
