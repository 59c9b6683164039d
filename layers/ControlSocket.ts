// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The state directory and the socket in it: `control.sock` says who runs here, so that one
 * directory has one daemon. JSON lines; mode 0600.
 *
 * Who finds a socket that answers is told the pid behind it. A socket that nobody answers was left
 * by a process that was killed, and is replaced. Two daemons that start in the same instant are
 * told apart by the answer: each asks its own socket who it is before it goes on.
 */
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import * as fs from "node:fs"
import * as net from "node:net"
import * as path from "node:path"
import * as Directories from "./Directories.ts"

/** The directory cannot be made or written: EX_CANTCREAT. */
export class StateDirectoryError extends Schema.TaggedError<StateDirectoryError>()(
  "StateDirectoryError",
  {
    directory: Schema.String,
    detail: Schema.String,
    cause: Schema.Defect()
  }
) {
  override get message(): string {
    return `state directory ${this.directory}: ${this.detail}`
  }
}

/** Another daemon runs in the directory. */
export class StateDirectoryHeld extends Schema.TaggedError<StateDirectoryHeld>()(
  "StateDirectoryHeld",
  {
    directory: Schema.String,
    pid: Schema.Int,
    since: Schema.String
  }
) {
  override get message(): string {
    return `state directory ${this.directory} is in use by pepsi with pid ${this.pid}, started ${this.since}`
  }
}

/** Who holds a directory. */
const Holder = Schema.Struct({ pid: Schema.Int, since: Schema.String })
type Holder = typeof Holder.Type

const Question = Schema.fromJsonString(Schema.Struct({ ask: Schema.String }))

/** Longest question; there is no long one. */
const maxQuestion = 4096

const socketOf = (directory: string): string => path.join(directory, "control.sock")

/** Makes the directory if needed and holds it until the scope closes. */
export const layer = (
  directory: string
): Layer.Layer<never, StateDirectoryError | StateDirectoryHeld> =>
  Layer.effectDiscard(
    Effect.gen(function* () {
      yield* makeDirectory(directory)
      const self: Holder = { pid: process.pid, since: new Date().toISOString() }
      yield* refuseHeld(directory)
      yield* Effect.acquireRelease(listen(directory, self), close)
      const holder = yield* who(directory)
      if (holder !== undefined && holder.pid !== self.pid) return yield* held(directory, holder)
    })
  )

const held = (directory: string, holder: Holder) =>
  Effect.fail(new StateDirectoryHeld({ directory, ...holder }))

const refuseHeld = Effect.fnUntraced(function* (directory: string) {
  const holder = yield* who(directory)
  if (holder !== undefined) return yield* held(directory, holder)
})

/** The daemon that runs in a directory, if one answers within two seconds. */
const who = (directory: string): Effect.Effect<Holder | undefined> =>
  ask(directory).pipe(
    Effect.flatMap(Schema.decodeUnknownEffect(Holder)),
    // Nobody there, or nobody of ours: then there is no holder.
    Effect.orElseSucceed(() => undefined)
  )

/** Asks the daemon of a directory who it is. Fails when nobody answers. */
const ask = (directory: string): Effect.Effect<unknown, StateDirectoryError> =>
  Effect.callback<unknown, StateDirectoryError>((resume) => {
    const socket = net.connect(socketOf(directory))
    let text = ""
    const fail = (detail: string, cause: unknown) =>
      resume(Effect.fail(new StateDirectoryError({ directory, detail, cause })))
    socket.setEncoding("utf8")
    socket.on("connect", () => socket.write(`${JSON.stringify({ ask: "who" })}\n`))
    socket.on("data", (chunk: string) => {
      text += chunk
    })
    socket.on("error", (cause) => fail("no daemon answers", cause))
    socket.on("end", () =>
      resume(
        Effect.mapError(
          Schema.decodeEffect(Schema.fromJsonString(Schema.Unknown))(text),
          (cause) => new StateDirectoryError({ directory, detail: "no answer of ours", cause })
        )
      )
    )
    return Effect.sync(() => socket.destroy())
  }).pipe(
    Effect.timeoutOrElse({
      duration: "2 seconds",
      orElse: () =>
        Effect.fail(
          new StateDirectoryError({ directory, detail: "no answer in time", cause: undefined })
        )
    })
  )

/**
 * As root others may pass through (the database runs under a user of its own) but not look; else
 * nobody else may enter at all.
 */
const makeDirectory = (directory: string): Effect.Effect<void, StateDirectoryError> =>
  Effect.try({
    try: () => {
      if (Directories.make(directory, 0o755) !== undefined) {
        fs.chmodSync(directory, process.getuid?.() === 0 ? 0o711 : 0o700)
      }
      fs.accessSync(directory, fs.constants.W_OK | fs.constants.X_OK)
    },
    catch: (cause) =>
      new StateDirectoryError({
        directory,
        detail: `cannot be written (${codeOf(cause)}); set PEPSI_HOME, or STATE_DIR of [pepsi], to one that can`,
        cause
      })
  })

const codeOf = (cause: unknown): string =>
  cause instanceof Error && "code" in cause && typeof cause.code === "string"
    ? cause.code
    : "unknown error"

/** A socket that listens, and the file it is. */
interface Listening {
  readonly server: net.Server
  readonly file: string
  readonly inode: number
}

const listen = (directory: string, self: Holder) =>
  Effect.callback<Listening, StateDirectoryError>((resume) => {
    const file = socketOf(directory)
    const failed = (cause: unknown) =>
      resume(
        Effect.fail(
          new StateDirectoryError({ directory, detail: `control.sock: ${codeOf(cause)}`, cause })
        )
      )
    const server = net.createServer({ allowHalfOpen: true }, (socket) => serve(socket, self))
    server.on("error", failed)
    fs.rmSync(file, { force: true })
    const mask = process.umask(0o177)
    server.listen(file, () => {
      server.unref()
      resume(Effect.succeed({ server, file, inode: fs.statSync(file).ino }))
    })
    process.umask(mask)
  })

const serve = (socket: net.Socket, self: Holder): void => {
  let text = ""
  socket.setEncoding("utf8")
  socket.setTimeout(5000, () => socket.destroy())
  // Whoever asked has gone.
  socket.on("error", () => socket.destroy())
  socket.on("data", (chunk: string) => {
    text += chunk
    if (text.length > maxQuestion) return socket.destroy()
    if (!text.includes("\n")) return
    const question = Schema.decodeResult(Question)(text.slice(0, text.indexOf("\n")))
    const isKnown = question._tag === "Success" && question.success.ask === "who"
    socket.end(`${JSON.stringify(isKnown ? self : { error: "unknown question" })}\n`)
  })
}

/** The file is removed only if it is still ours: who replaced it holds the directory. */
const close = ({ file, inode, server }: Listening): Effect.Effect<void> =>
  Effect.callback<void>((resume) => {
    const isOurs = fs.statSync(file, { throwIfNoEntry: false })?.ino === inode
    server.close(() => resume(Effect.void))
    if (isOurs) fs.rmSync(file, { force: true })
  })
