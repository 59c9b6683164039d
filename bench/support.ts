// SPDX-License-Identifier: AGPL-3.0-or-later
/** What benchmarks share: a daemon of their own, a plain SMTP dialogue, and figures. */
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { spawn } from "node:child_process"
import type { ChildProcess } from "node:child_process"
import * as fs from "node:fs"
import * as net from "node:net"
import * as os from "node:os"
import * as path from "node:path"

/** Something that a measurement needs did not come about. */
export class BenchError extends Schema.TaggedError<BenchError>()("BenchError", {
  what: Schema.String,
  cause: Schema.Defect()
}) {
  override get message(): string {
    return `${this.what}: ${String(this.cause)}`
  }
}

/** A daemon under measurement. */
export interface Server {
  readonly home: string
  readonly port: number
  /** Of the daemon; workers and database are its descendants. */
  readonly pid: number
  /** The directory mail for this name arrives in. */
  readonly newOf: (mailbox: string) => string
}

const started = /SMTP +\S+ port (\d+)/

/**
 * A daemon in a fresh state directory, on any free port, with the built-in wiring; `extra` is
 * added to its configuration. Ended with the scope; the directory stays, because
 * deleting many files makes the file system slow for the next run.
 */
export const server = (extra = ""): Effect.Effect<Server, BenchError, Scope.Scope> =>
  Effect.acquireRelease(start(extra), stop).pipe(Effect.map(({ server: running }) => running))

interface Started {
  readonly server: Server
  readonly child: ChildProcess
}

const start = (extra: string) =>
  Effect.callback<Started, BenchError>((resume) => {
    const home = fs.mkdtempSync(path.join(os.tmpdir(), "pepsi-bench-"))
    // The database runs under a user of its own where we are root.
    fs.chmodSync(home, 0o711)
    const child = spawn(
      process.execPath,
      [process.argv[1] ?? "", "serve", "-c", configFile(home, extra)],
      {
        stdio: ["ignore", "pipe", "inherit"],
        env: { ...process.env, PEPSI_HOME: home }
      }
    )
    let output = ""
    child.stdout.setEncoding("utf8").on("data", (chunk: string) => {
      output += chunk
      const port = started.exec(output)?.[1]
      if (port === undefined || child.pid === undefined) return
      const newOf = (mailbox: string) => path.join(home, "mail", mailbox, "new")
      resume(Effect.succeed({ child, server: { home, port: Number(port), pid: child.pid, newOf } }))
    })
    child.once("exit", (code) =>
      resume(Effect.fail(new BenchError({ what: "the daemon ended", cause: code })))
    )
  })

const stop = ({ child }: Started) =>
  Effect.callback<void>((resume) => {
    child.removeAllListeners("exit").once("exit", () => resume(Effect.void))
    child.kill("SIGTERM")
  })

const configFile = (home: string, extra: string): string => {
  const file = path.join(home, "pepsi.conf")
  fs.writeFileSync(
    file,
    `
[pepsi]
HOSTNAME = mail.pepsi.test
DOMAINS = pepsi.test
USERS = any
LOG = warn
[pepsi-ingress]
PORT = 0
MAX_CONNECTIONS = 2000
[stage-init]
PROGRAM = arc
NEXT = route
[stage-route]
PROGRAM = if
MODE = recipient
WHEN_1 = is_local(rcpt) => local
ELSE = discard
[stage-local]
PROGRAM = local
[stage-discard]
PROGRAM = discard
${extra}`
  )
  return file
}

/** A message of about `bytes` octets with a subject that tells it from others. */
export const message = (bytes: number, subject: string): Buffer => {
  const header = `From: sender@example.org\r\nTo: dave@pepsi.test\r\nSubject: ${subject}\r\n\r\n`
  const line = "Nothing is said in these lines, and they say it over and over again.\r\n"
  return Buffer.from(
    header + line.repeat(Math.max(1, Math.round((bytes - header.length) / line.length)))
  )
}

/** One SMTP connection, spoken command by command as a plain client does. */
export class Session {
  readonly #socket: net.Socket
  #text = ""
  #waiting: ((reply: string) => void) | undefined
  #failed: ((error: Error) => void) | undefined

  constructor(port: number) {
    this.#socket = net.connect({ port, host: "127.0.0.1", noDelay: true })
    this.#socket.setEncoding("latin1").on("data", (chunk: string) => this.#read(chunk))
    this.#socket.on("error", (error) => this.#failed?.(error))
    this.#socket.on("close", () => this.#failed?.(new Error("connection closed")))
  }

  /** Waits for a reply, after `line` was sent if one is given; refuses one of another class. */
  async say(line: string | undefined, expected: string): Promise<string> {
    const reply = await new Promise<string>((resolve, reject) => {
      this.#waiting = resolve
      this.#failed = reject
      if (line !== undefined) this.#socket.write(line)
    })
    if (!reply.startsWith(expected)) throw new Error(`${line?.slice(0, 60) ?? "connect"}: ${reply}`)
    return reply
  }

  async open(): Promise<void> {
    await this.say(undefined, "220")
    await this.say("EHLO bench.pepsi.test\r\n", "250")
  }

  /**
   * One message; returns when it has its 250. `octets` must hold no line that begins with a dot.
   */
  async send(to: string, octets: Buffer): Promise<void> {
    await this.say("MAIL FROM:<sender@example.org>\r\n", "250")
    await this.say(`RCPT TO:<${to}>\r\n`, "250")
    await this.say("DATA\r\n", "354")
    this.#socket.write(octets)
    await this.say(".\r\n", "250")
  }

  close(): void {
    this.#failed = undefined
    this.#socket.end("QUIT\r\n")
    this.#socket.resume()
  }

  #read(chunk: string): void {
    this.#text += chunk
    const end = /^\d{3} .*\r\n/m.exec(this.#text)
    if (end === null) return
    const reply = this.#text.slice(end.index, end.index + end[0].length).trim()
    this.#text = ""
    this.#waiting?.(reply)
  }
}

/** Of a list of numbers; all 0 for an empty one. */
export interface Summary {
  readonly min: number
  readonly median: number
  readonly mean: number
  readonly p95: number
  readonly max: number
}

export const summarize = (values: ReadonlyArray<number>): Summary => {
  const sorted = values.toSorted((a, b) => a - b)
  const at = (part: number) =>
    sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))] ?? 0
  const mean = sorted.reduce((sum, value) => sum + value, 0) / Math.max(1, sorted.length)
  return { min: at(0), median: at(0.5), mean, p95: at(0.95), max: at(1) }
}

/** What a benchmark writes with `--json FILE`. */
export interface Result {
  readonly figures: { readonly [name: string]: number }
  readonly rows: ReadonlyArray<{ readonly [column: string]: string | number }>
}

/** The result with what it was measured on. */
export const document = (result: Result): string =>
  `${JSON.stringify(
    {
      host: {
        cpus: os.cpus().length,
        model: os.cpus()[0]?.model ?? "",
        memoryBytes: os.totalmem(),
        kernel: os.release()
      },
      versions: process.versions,
      at: new Date().toISOString(),
      ...result
    },
    null,
    2
  )}\n`

/** A table as people read it. */
export const table = (
  head: ReadonlyArray<string>,
  rows: ReadonlyArray<ReadonlyArray<string>>
): string => {
  const widths = head.map((title, i) =>
    Math.max(title.length, ...rows.map((row) => row[i]?.length ?? 0))
  )
  const line = (cells: ReadonlyArray<string>) =>
    cells
      .map((cell, i) => (i === 0 ? cell.padEnd(widths[i]!) : cell.padStart(widths[i]!)))
      .join("  ")
  return [line(head), ...rows.map(line)].join("\n")
}
