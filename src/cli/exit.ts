// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What the shell is told: exit codes of sysexits.h, one for each kind of trouble, and one clear
 * line on standard error.
 */
import * as Cause from "effect/Cause"
import * as Exit from "effect/Exit"
import type * as Runtime from "effect/Runtime"

/** sysexits.h, as far as we use it. */
export const codes = {
  ok: 0,
  usage: 64,
  data: 65,
  unavailable: 69,
  software: 70,
  cantCreate: 73,
  temporary: 75,
  config: 78
} as const

/** Trouble by the tag of its error, where the tag says all. */
const byTag: { readonly [tag: string]: number } = {
  CertificateError: codes.config,
  ConfigurationInvalid: codes.config,
  DatabaseError: codes.unavailable,
  DatabaseUnfit: codes.config,
  ListenError: codes.unavailable,
  StageUnavailable: codes.config,
  BenchError: codes.temporary,
  StateDirectoryError: codes.cantCreate,
  StateDirectoryHeld: codes.unavailable,
  TransportError: codes.unavailable,
  UsageError: codes.usage
}

/** Trouble whose kind is in its `reason`. */
const byReason: { readonly [tag: string]: { readonly [reason: string]: number } } = {
  EmbeddedPostgresError: {
    binaries: codes.unavailable,
    start: codes.unavailable,
    version: codes.config,
    directory: codes.cantCreate
  },
  CertificateError: { "cannot be written": codes.cantCreate }
}

interface Tagged {
  readonly _tag: string
  readonly message?: unknown
  readonly reason?: unknown
  /** An error that knows better than its tag. */
  readonly exitCode?: unknown
}

const isTagged = (error: unknown): error is Tagged =>
  typeof error === "object" && error !== null && "_tag" in error && typeof error._tag === "string"

/** The exit code of an error that reached the end of the program. */
export const codeOf = (error: unknown): number => {
  if (!isTagged(error)) return codes.software
  if (typeof error.exitCode === "number") return error.exitCode
  const known = byReason[error._tag]?.[String(error.reason)]
  return known ?? byTag[error._tag] ?? codes.software
}

/** What is written for it: a known error its own sentence, a fault of ours all that is known. */
export const textOf = (cause: Cause.Cause<unknown>): string => {
  const error = Cause.squash(cause)
  if (isTagged(error) && typeof error.message === "string" && codeOf(error) !== codes.software) {
    return error.message
  }
  return `this is a fault in pepsi, please report it\n${Cause.pretty(cause)}`
}

/** Ends the process: 0 after a signal or a success, else the error's code and its line. */
export const teardown: Runtime.Teardown = (exit, onExit) => {
  if (Exit.isSuccess(exit) || Cause.hasInterruptsOnly(exit.cause)) return onExit(codes.ok)
  const error = Cause.squash(exit.cause)
  // The command line has printed these itself, help included.
  const code = isTagged(error) && error._tag === "ShowHelp" ? codes.usage : codeOf(error)
  if (!(isTagged(error) && error._tag === "ShowHelp"))
    process.stderr.write(`pepsi: ${textOf(exit.cause)}\n`)
  onExit(code)
}

/**
 * npm passes a Ctrl-C on that the terminal has sent already; what comes so soon is the same one.
 */
const sameSignalMillis = 500

/**
 * A second SIGINT or SIGTERM ends the process at once, and so does a shutdown that takes longer
 * than `graceSeconds`. Nothing is lost either way.
 */
export const boundShutdown = (graceSeconds: number): void => {
  let first: number | undefined
  const onSignal = () => {
    const now = performance.now()
    if (first === undefined) {
      first = now
      setTimeout(() => process.exit(codes.software), graceSeconds * 1000).unref()
    } else if (now - first > sameSignalMillis) {
      process.exit(codes.software)
    }
  }
  process.on("SIGTERM", onSignal).on("SIGINT", onSignal)
  // The terminal was closed: that ends us as a Ctrl-C does.
  process.on("SIGHUP", () => process.kill(process.pid, "SIGTERM"))
}
