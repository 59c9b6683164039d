// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The lines a daemon and its workers speak: one JSON value a line, the daemon's on the worker's
 * standard input, the worker's on its standard output.
 *
 * The first line each way carries the version; a worker of another version is ended. Every line
 * is bounded. A line that does not decode is a fault of the program, not of a mail: whoever reads
 * it ends the conversation, and the rows in hand are handed out again. Pure.
 */
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"

/** Raised when a line changes its meaning. */
export const version = 1

/**
 * Longest line, characters. A report of 64 settled rows with 16 runs each is about 60 KB; the
 * set-up line carries the whole configuration.
 */
export const maxLine = 1024 * 1024

const Id = Schema.Int
const Section = Schema.String

/** Row flags of a run order. */
export const flags = { repeat: 1, alone: 2 } as const

/** First line to a worker: what it is and the configuration it runs under. */
export const SetUp = Schema.Struct({
  t: Schema.Literal("setup"),
  version: Schema.Int,
  generation: Schema.String,
  section: Section,
  configuration: Schema.String
})

/** Rows to run: id, rev, flags. */
export const RunOrder = Schema.Struct({
  t: Schema.Literal("run"),
  generation: Schema.String,
  rows: Schema.Array(Schema.Tuple([Id, Schema.Int, Schema.Int]))
})

/** What a daemon says. */
export const Order = Schema.Union([SetUp, RunOrder])
export type Order = typeof Order.Type

/** A row that waits: id, rev, section, octets, fair key, attempts, crashes. */
const EntryTuple = Schema.Tuple([
  Id,
  Schema.Int,
  Section,
  Schema.Finite,
  Schema.String,
  Schema.Int,
  Schema.Int
])
export type EntryTuple = typeof EntryTuple.Type

/** A run in a chain: section, result, microseconds, 1 = behind another. */
const RunTuple = Schema.Tuple([
  Section,
  Schema.Literals(["pass", "done", "defer", "park", "fail", "fanout"]),
  Schema.Int,
  Schema.Int
])

/** First line of a worker: ready for orders. `backend` is the pid of its database session. */
export const WorkerReady = Schema.Struct({
  t: Schema.Literal("ready"),
  version: Schema.Int,
  pid: Schema.Int,
  backend: Schema.Int
})

/** Still alive. `backend` as its session is now. */
export const Beat = Schema.Struct({ t: Schema.Literal("beat"), backend: Schema.Int })

/** Rows whose outcome is written or was refused by the fence. */
export const SettledReport = Schema.Struct({
  t: Schema.Literal("settled"),
  rows: Schema.Array(
    Schema.Struct({
      id: Id,
      /** applied, fenced */
      kind: Schema.Literals(["applied", "fenced"]),
      status: Schema.String,
      /** Present where the row is pending somewhere now. */
      entry: Schema.optional(EntryTuple),
      /** Seconds until a deferred row is due. */
      dueSeconds: Schema.optional(Schema.Finite),
      error: Schema.optional(Schema.String),
      runs: Schema.Array(RunTuple)
    })
  ),
  /** Children and emissions that wait now. */
  fresh: Schema.Array(EntryTuple),
  retries: Schema.Int
})

/** Rows that were not run, or whose run left no trace. */
export const ReturnedReport = Schema.Struct({
  t: Schema.Literal("returned"),
  ids: Schema.Array(Id),
  /** gone: not there under that rev · overload, away: the database · unloadable: this row alone */
  why: Schema.Literals(["gone", "overload", "away", "unloadable"])
})

/** A stage threw on this row: a fault of ours; the worker ends after settling the others. */
export const ThrewReport = Schema.Struct({
  t: Schema.Literal("threw"),
  id: Id,
  section: Section,
  error: Schema.String
})

/** What a worker says. */
export const Report = Schema.Union([WorkerReady, Beat, SettledReport, ReturnedReport, ThrewReport])
export type Report = typeof Report.Type

/** A line that is too long, no JSON, or not one of ours. */
export class WireError extends Schema.TaggedError<WireError>()("WireError", {
  /** The beginning of the line; lines hold no address and no octet of a message. */
  line: Schema.String,
  cause: Schema.Defect()
}) {}

const OrderLine = Schema.fromJsonString(Order)
const ReportLine = Schema.fromJsonString(Report)

const decoder = <A>(schema: Schema.Codec<A, string>) => {
  const decode = Schema.decodeUnknownResult(schema)
  return (line: string): Result.Result<A, WireError> =>
    line.length > maxLine
      ? Result.fail(
          new WireError({ line: line.slice(0, 80), cause: new Error(`over ${maxLine} characters`) })
        )
      : Result.mapError(decode(line), (cause) => new WireError({ line: line.slice(0, 80), cause }))
}

export const decodeOrder = decoder(OrderLine)
export const decodeReport = decoder(ReportLine)

/** One line with its end. What we say ourselves needs no check. */
export const encode = (message: Order | Report): string => `${JSON.stringify(message)}\n`
