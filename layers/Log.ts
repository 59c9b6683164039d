// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The log: one line an event on standard error, logfmt or JSON. Standard output belongs to the
 * answers of commands and to the wire of workers.
 */
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import type * as LogLevel from "effect/LogLevel"
import * as References from "effect/References"

export type Format = "logfmt" | "json"

/** Words of `[pepsi] LOG`. */
const levels: { readonly [word: string]: LogLevel.LogLevel } = {
  trace: "Trace",
  debug: "Debug",
  info: "Info",
  warn: "Warn",
  error: "Error",
  none: "None"
}

/** The level of a word of `[pepsi] LOG`; what is no such word logs at info. */
export const level = (word: string): LogLevel.LogLevel => levels[word] ?? "Info"

/** Writes to standard error; a reader that has gone away is no reason to stop. */
const write = (line: string): void => void process.stderr.write(`${line}\n`)

const lines = (format: Format) =>
  format === "json" ? Logger.map(Logger.formatJson, write) : Logger.map(Logger.formatLogFmt, write)

/** The log of one process. */
export const layer = (format: Format, minimum: LogLevel.LogLevel): Layer.Layer<never> =>
  Layer.mergeAll(Logger.layer([lines(format)]), Layer.succeed(References.MinimumLogLevel, minimum))

/** What is logged while the configuration is not read yet. */
export const early: Layer.Layer<never> = layer("logfmt", "Warn")
