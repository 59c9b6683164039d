// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The whole program under test: `pepsi serve` from dist/ in a state directory of its own, with its
 * own database server and real sockets. What a test starts is ended with its scope.
 */
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { execFile, spawn } from "node:child_process"
import type { ChildProcess } from "node:child_process"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"
import { fileURLToPath } from "node:url"

/** The bundled program. */
export const program = fileURLToPath(new URL("../../dist/main.mjs", import.meta.url))

/** A directory that a database server under another user may pass through; gone with the scope. */
export const directory: Effect.Effect<string, never, Scope.Scope> = Effect.acquireRelease(
  Effect.sync(() => {
    const made = fs.mkdtempSync(path.join(os.tmpdir(), "pepsi-daemon-"))
    fs.chmodSync(made, 0o711)
    return made
  }),
  (made) => Effect.sync(() => fs.rmSync(made, { recursive: true, force: true }))
)

/** The built-in wiring on any free port; `more` is added, `pepsi` to the section [pepsi]. */
export const configuration = (
  more: { readonly pepsi?: string; readonly more?: string } = {}
): string => `
[pepsi]
HOSTNAME = mail.pepsi.test
DOMAINS = pepsi.test
USERS = any
LOG = warn
${more.pepsi ?? ""}
[pepsi-ingress]
PORT = 0
[pepsi-dispatch]
POLL_INTERVAL = 500 ms
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
${more.more ?? ""}`

export interface Ended {
  readonly code: number | null
  readonly signal: NodeJS.Signals | null
  readonly millis: number
}

/** A daemon that has said that it runs. */
export class Daemon {
  readonly home: string
  readonly port: number
  readonly child: ChildProcess
  /** All it wrote, both streams. */
  readonly output: () => string

  constructor(home: string, port: number, child: ChildProcess, output: () => string) {
    this.home = home
    this.port = port
    this.child = child
    this.output = output
  }

  get pid(): number {
    return this.child.pid!
  }

  /** Sends a signal and waits for the end. */
  end(signal: NodeJS.Signals): Promise<Ended> {
    const began = performance.now()
    return new Promise((resolve) => {
      if (this.child.exitCode !== null || this.child.signalCode !== null) {
        return resolve({ code: this.child.exitCode, signal: this.child.signalCode, millis: 0 })
      }
      this.child.once("exit", (code, by) =>
        resolve({ code, signal: by, millis: performance.now() - began })
      )
      this.child.kill(signal)
    })
  }

  /** Pids of stage workers. */
  workers(): ReadonlyArray<number> {
    return childrenOf(this.pid).filter((pid) => commandOf(pid).includes("worker"))
  }

  /** Pid of the database server in its state directory. */
  postmaster(): number {
    return Number(
      fs.readFileSync(path.join(this.home, "postgres/postmaster.pid"), "utf8").split("\n")[0]
    )
  }

  newOf(mailbox: string): string {
    return path.join(this.home, "mail", mailbox, "new")
  }
}

/** Processes of this host: pid and parent, from /proc. */
const processes = (): ReadonlyArray<readonly [pid: number, parent: number]> =>
  fs
    .readdirSync("/proc")
    .filter((name) => /^\d+$/.test(name))
    .flatMap((name) => {
      try {
        const stat = fs.readFileSync(`/proc/${name}/stat`, "utf8")
        return [
          [Number(name), Number(stat.slice(stat.lastIndexOf(")") + 2).split(" ")[1])] as const
        ]
      } catch {
        return [] // it has just ended
      }
    })

export const childrenOf = (parent: number): ReadonlyArray<number> =>
  processes()
    .filter(([, of]) => of === parent)
    .map(([pid]) => pid)

/** A process with all that it has started, directly or not. */
export const familyOf = (pid: number): ReadonlyArray<number> => [
  pid,
  ...childrenOf(pid).flatMap(familyOf)
]

const commandOf = (pid: number): string => {
  try {
    return fs.readFileSync(`/proc/${pid}/cmdline`, "utf8").replaceAll("\0", " ")
  } catch {
    return "" // it has just ended
  }
}

/** Processes whose command line names a directory: what a daemon there may have left. */
export const processesOf = (home: string): ReadonlyArray<string> =>
  processes()
    .map(([pid]) => commandOf(pid))
    .filter((command) => command.includes(home))

const listening = /SMTP +\S+ port (\d+)/

/** Starts a daemon in `home`, whose pepsi.conf must be there; rejects if it ends instead. */
export const start = (
  home: string,
  env: { readonly [name: string]: string } = {}
): Promise<Daemon> =>
  new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [program, "serve", "-c", path.join(home, "pepsi.conf")], {
      stdio: ["ignore", "pipe", "pipe"],
      env: { ...process.env, PEPSI_HOME: home, ...env }
    })
    let output = ""
    const read = (chunk: Buffer) => {
      output += chunk.toString()
      const port = listening.exec(output)?.[1]
      if (port !== undefined) resolve(new Daemon(home, Number(port), child, () => output))
    }
    child.stdout.on("data", read)
    child.stderr.on("data", read)
    child.once("exit", (code) => reject(new Error(`the daemon ended with ${code}:\n${output}`)))
  })

/** A daemon in a directory of its own, ended with the scope whatever the test has done to it. */
export const daemon = (
  config: string = configuration(),
  env: { readonly [name: string]: string } = {}
): Effect.Effect<Daemon, never, Scope.Scope> =>
  Effect.flatMap(directory, (home) =>
    Effect.acquireRelease(
      Effect.promise(() => {
        fs.writeFileSync(path.join(home, "pepsi.conf"), config)
        return start(home, env)
      }),
      (running) => Effect.promise(() => running.end("SIGTERM"))
    )
  )

/** Runs a command of the program to its end. */
export const run = (
  args: ReadonlyArray<string>,
  options: {
    readonly input?: string | Buffer
    readonly env?: { readonly [name: string]: string }
  } = {}
): Promise<{ readonly code: number; readonly stdout: string; readonly stderr: string }> =>
  new Promise((resolve) => {
    const child = execFile(
      process.execPath,
      [program, ...args],
      {
        env: { ...process.env, ...options.env },
        timeout: 60_000,
        maxBuffer: 64 * 1024 * 1024
      },
      (error, stdout, stderr) => {
        const code = error === null ? 0 : typeof error.code === "number" ? error.code : -1
        resolve({ code, stdout, stderr })
      }
    )
    child.stdin?.on("error", () => undefined)
    child.stdin?.end(options.input ?? "")
  })

/** Waits until something holds, looking every 10 ms; the test's own time limit is the bound. */
export const until = async <A>(look: () => A | undefined | false): Promise<A> => {
  while (true) {
    const found = look()
    if (found !== undefined && found !== false) return found
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}

/** Files of a directory, none if it is not there. */
export const list = (directory_: string): ReadonlyArray<string> =>
  fs.existsSync(directory_)
    ? fs.readdirSync(directory_).map((name) => path.join(directory_, name))
    : []
