// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * One SMTP session: a connection of smtp-server whose commands are decided by `Transaction`, whose
 * messages are read by `SmtpData`, and which keeps deadlines of its own. What the library does well
 * stays with it: lines, EHLO, STARTTLS, closing (docs/decisions/0003).
 */
import type { Socket } from "node:net"
import { TLSSocket } from "node:tls"
import type * as Effect from "effect/Effect"
import * as Duration from "effect/Duration"
import * as Result from "effect/Result"
import { SMTPConnection } from "smtp-server/lib/smtp-connection.js"
import { SMTPStream } from "smtp-server/lib/smtp-stream.js"
import type { SMTPServer } from "smtp-server"
import * as Smtp from "../src/mail/Smtp.ts"
import * as SmtpData from "../src/mail/SmtpData.ts"
import * as Transaction from "../src/mail/Transaction.ts"
import type { Client, Policy, Service } from "../src/services/SmtpServer.ts"

/** What the sessions of one service share. */
export interface Shared {
  readonly service: Service
  readonly policy: Policy
  readonly budget: SmtpData.Budget & { readonly freeBytes: () => number }
  /** Milliseconds on a clock that never steps. */
  readonly now: () => number
  /** Asks the policy; a defect is logged and becomes a temporary refusal. */
  readonly ask: (question: Effect.Effect<Smtp.Reply>, then: (answer: Smtp.Reply) => void) => void
  /** A session has closed or has given the reply to a message. */
  readonly changed: (session: Session) => void
  /** The peer went away before its message had ended. */
  readonly lost: (session: Session) => void
  readonly isStopping: () => boolean
}

/** Octets of a command line: RFC 5321 section 4.5.3.1.4 asks for 512, long paths need more. */
const maxCommand = 2048

/** Over which progress is measured; a shorter window would cut off links that stall. */
const progressWindowMillis = 60_000

/** The line reader of the library with our reader for messages. */
class Parser extends SMTPStream {
  #incoming: SmtpData.Incoming | undefined
  #finished: () => void = () => undefined
  #resume: () => void = () => undefined

  /** Reads a message up to its end; nothing behind it is looked at before `proceed`. */
  receive(incoming: SmtpData.Incoming, finished: () => void): void {
    this.#incoming = incoming
    this.#finished = finished
    this._dataMode = true
  }

  proceed(): void {
    this.#resume()
  }

  override _feedDataStream(segment: Buffer, done: (error?: Error | null) => void): void {
    const end = this.#incoming?.push(segment)
    if (end === undefined) return done()
    this.#incoming = undefined
    this._dataMode = false
    this._remainder = ""
    this.#resume = () => this._write(segment.subarray(end), "buffer", done)
    this.#finished()
  }

  /** A last line without its end is no command: the client was cut off while it wrote. */
  override _flushData(): void {}
}

type Done = () => void

export class Session extends SMTPConnection {
  readonly #shared: Shared
  readonly #listener: string
  #transaction = Transaction.empty
  #incoming: SmtpData.Incoming | undefined
  /** The policy has a message of ours: nothing may cut this session. */
  #isCommitting = false
  #hasLeft = false
  /** When the client must have sent what it owes us. */
  #deadline: number
  readonly #end: number
  #progress = { seenBytes: 0, windowBytes: 0, windowMillis: 0 }

  constructor(server: SMTPServer, socket: Socket, shared: Shared, listener: string) {
    super(server, socket)
    this.#shared = shared
    this.#listener = listener
    this.#deadline = this.#in(shared.service.limits.commandTimeout)
    this.#end = this.#in(shared.service.limits.sessionTimeout)
  }

  get isReceiving(): boolean {
    return this.#incoming !== undefined
  }

  get isCommitting(): boolean {
    return this.#isCommitting
  }

  /** Without the library's wait of 100 ms before the banner. */
  override init(): void {
    this._setListeners(() => this.connectionReady())
  }

  override _createParser(): SMTPStream {
    const parser = new Parser({ maxCommandLength: maxCommand })
    parser.oncommand = (line, done) => this._onCommand(line, done)
    // The reader only fails by a line that does not end.
    parser.on("error", () => this.#say(Smtp.reply(421, "4.5.2", "command line too long")))
    return parser
  }

  override _getEnhancedStatusCode(code: number, context?: string | false): string {
    if (typeof context === "string" && /^\d\.\d/.test(context)) return context
    // RFC 2034 section 3 excepts the greeting and the good reply to EHLO, not a refusal.
    const isRefusal = context === false && code >= 400
    return super._getEnhancedStatusCode(code, isRefusal ? undefined : context)
  }

  override send(
    code: number,
    text?: string | Array<string> | null,
    context?: string | false
  ): void {
    this.#gather()
    super.send(code, text, context)
    this.#deadline = this.#in(this.#shared.service.limits.commandTimeout)
  }

  override _resetSession(): void {
    super._resetSession()
    this.#transaction = Transaction.empty
  }

  override upgrade(callback: Done, secureCallback?: Done): void {
    // The reply in clear has to be out before the handshake has the socket.
    this._socket.uncork()
    super.upgrade(callback, secureCallback)
    this.#deadline = this.#in(this.#shared.service.limits.handshakeTimeout)
  }

  override close(): void {
    super.close()
    if (!this.#isCommitting) this.#drop()
  }

  override _onClose(): void {
    super._onClose()
    if (this.#hasLeft) return
    this.#hasLeft = true
    if (this.isReceiving && !this.#isCommitting) {
      this.#shared.lost(this)
      this.#drop()
    }
    this.#shared.changed(this)
  }

  override handler_MAIL(line: Buffer, done: Done): void {
    const begun = Transaction.begin(this.#transaction, line, this.#limits())
    if (Result.isSuccess(begun)) this.#transaction = begun.success
    this.#say(Result.isSuccess(begun) ? Smtp.reply(250, "2.1.0", "sender ok") : begun.failure)
    done()
  }

  override handler_RCPT(line: Buffer, done: Done): void {
    const wanted = Transaction.recipient(this.#transaction, line, this.#limits())
    if (Result.isFailure(wanted)) {
      this.#say(wanted.failure)
      return done()
    }
    this.#shared.ask(this.#shared.policy.recipient(wanted.success), (answer) => {
      if (Smtp.isPositive(answer)) {
        this.#transaction = Transaction.accept(this.#transaction, wanted.success)
      }
      this.#say(answer)
      done()
    })
  }

  override handler_DATA(line: Buffer, done: Done): void {
    const envelope = Transaction.data(this.#transaction, line, this.#limits())
    if (Result.isFailure(envelope) || !(this._parser instanceof Parser)) {
      this.#say(Result.isFailure(envelope) ? envelope.failure : Smtp.temporary)
      return done()
    }
    const { lineBytes, messageBytes } = this.#shared.service.limits
    const incoming = SmtpData.make({ sizeBytes: messageBytes, lineBytes }, this.#shared.budget)
    this.#incoming = incoming
    this._parser.receive(incoming, () => this.#received(envelope.success, incoming))
    this.send(354, "end with <CRLF>.<CRLF>")
    this.#deadline = this.#in(this.#shared.service.limits.dataTimeout)
    this.#progress = { seenBytes: 0, windowBytes: 0, windowMillis: this.#shared.now() }
    done()
  }

  override handler_VRFY(_line: Buffer, done: Done): void {
    // RFC 5321 section 7.3: who exists here is learned by writing to them.
    this.#say(Smtp.reply(252, "2.5.2", "send mail to find out"))
    done()
  }

  handler_EXPN(_line: Buffer, done: Done): void {
    this.#say(Smtp.reply(502, "5.5.1", "not implemented"))
    done()
  }

  override handler_HELP(_line: Buffer, done: Done): void {
    this.#say(Smtp.reply(214, "2.0.0", "see RFC 5321"))
    done()
  }

  /** Ends the session if the client is late. Called about once a second. */
  check(now: number): void {
    if (this.#isCommitting) return
    if (now >= this.#end || this.#isLate(now)) this.#say(Smtp.reply(421, "4.4.2", "timeout"))
  }

  /** Tells the client to go, unless it is sending a message: then after the reply to that. */
  stop(): void {
    if (!this.isReceiving) this.#say(Smtp.shuttingDown)
  }

  /** Ends the session at once, a message on its way in included. */
  abort(): void {
    if (!this.#isCommitting) this.#say(Smtp.shuttingDown)
  }

  destroy(): void {
    this._socket.destroy()
  }

  /** RFC 2920 section 3.2: the replies to a group of commands go out together. */
  #gather(): void {
    const socket = this._socket
    if (socket.writableCorked > 0) return
    socket.cork()
    process.nextTick(() => socket.uncork())
  }

  #in(duration: Duration.Duration): number {
    return this.#shared.now() + Duration.toMillis(duration)
  }

  #limits(): Transaction.Limits {
    const { messageBytes, recipients } = this.#shared.service.limits
    return { messageBytes, recipients, freeBytes: this.#shared.budget.freeBytes() }
  }

  #say({ code, status, text }: Smtp.Reply): void {
    // RFC 5321 section 4.2.3: a 421 names the host.
    this.send(code, code === 421 ? `${this.name} ${text}` : text, status)
  }

  #isLate(now: number): boolean {
    const incoming = this.#incoming
    if (incoming === undefined) return now >= this.#deadline
    const { dataTimeout, minBytesPerSecond } = this.#shared.service.limits
    const seenBytes = incoming.seenBytes()
    if (seenBytes !== this.#progress.seenBytes) this.#deadline = this.#in(dataTimeout)
    this.#progress.seenBytes = seenBytes
    const elapsed = now - this.#progress.windowMillis
    if (elapsed < progressWindowMillis) return now >= this.#deadline
    const isSlow = (seenBytes - this.#progress.windowBytes) * 1000 < minBytesPerSecond * elapsed
    this.#progress = { seenBytes, windowBytes: seenBytes, windowMillis: now }
    return isSlow
  }

  #received(envelope: Transaction.Envelope, incoming: SmtpData.Incoming): void {
    const fault = incoming.fault()
    if (fault !== undefined) return this.#conclude(Smtp.faultReply(fault))
    this.#isCommitting = true
    const message = { ...envelope, client: this.#client(), octets: incoming.octets() }
    this.#shared.ask(this.#shared.policy.message(message), (answer) => this.#conclude(answer))
  }

  #conclude(answer: Smtp.Reply): void {
    this.#isCommitting = false
    this.#drop()
    this._unrecognizedCommands = 0
    this._resetSession()
    this.#say(answer)
    if (this.#shared.isStopping()) this.stop()
    else if (this._parser instanceof Parser) this._parser.proceed()
    this.#shared.changed(this)
  }

  #drop(): void {
    this.#incoming?.dispose()
    this.#incoming = undefined
  }

  #client(): Client {
    const socket = this._socket
    return {
      ip: this.remoteAddress,
      port: this.remotePort,
      helo: this.hostNameAppearsAs || "",
      isExtended: this.openingCommand === "EHLO",
      tls:
        socket instanceof TLSSocket
          ? { version: socket.getProtocol() ?? "", cipher: socket.getCipher().standardName }
          : undefined,
      listener: this.#listener
    }
  }
}
