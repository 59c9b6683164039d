// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * One SMTP session: a connection of smtp-server whose commands are decided by `Transaction`, whose
 * messages are read by `SmtpData`, and which keeps deadlines and counts errors itself. What the
 * library does well stays with it: lines, EHLO, STARTTLS, closing (docs/decisions/0003).
 */
import type { Socket } from "node:net"
import { TLSSocket } from "node:tls"
import type { CipherNameAndProtocol } from "node:tls"
import * as Effect from "effect/Effect"
import * as Duration from "effect/Duration"
import * as Result from "effect/Result"
import { SMTPConnection } from "smtp-server/lib/smtp-connection.js"
import type { SMTPStream } from "smtp-server/lib/smtp-stream.js"
import type { SMTPServer } from "smtp-server"
import * as Smtp from "../src/mail/Smtp.ts"
import * as SmtpData from "../src/mail/SmtpData.ts"
import * as Transaction from "../src/mail/Transaction.ts"
import type { Client, Policy, Service } from "../src/services/SmtpServer.ts"
import { isBare, Reader } from "./SmtpServerReader.ts"
import type { Share } from "./SmtpServerSources.ts"

/** What the sessions of one service share. */
export interface Shared {
  readonly service: Service
  readonly policy: Policy
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

/** Over which progress is measured; a shorter window would cut off links that stall. */
const progressWindowMillis = 60_000

/**
 * Recipients beyond the limit that count as no error: a client that does not wait for replies names
 * all it has, and is to send the rest in another transaction (RFC 5321 section 4.5.3.1.10).
 */
const freeExcess = 1000

/** Commands that do nothing for a message. */
const idle = /^(?:NOOP|RSET|EHLO|HELO|VRFY|HELP)(?: |$)/i

type Done = () => void

/** How a connection came in. */
export interface Entry {
  /** Name of the listener. */
  readonly listener: string
  readonly share: Share
}

export class Session extends SMTPConnection {
  readonly #shared: Shared
  readonly #listener: string
  readonly #share: Share
  #transaction = Transaction.empty
  #incoming: SmtpData.Incoming | undefined
  /** The policy has a message of ours: nothing may cut this session. */
  #isCommitting = false
  #hasLeft = false
  /** When the client must have sent what it owes us. */
  #deadline: number
  readonly #end: number
  #progress = { seenBytes: 0, windowBytes: 0, windowMillis: 0 }
  /** Since the session began, but idle commands since the last message that was taken. */
  readonly #counts = { errors: 0, excess: 0, idle: 0, unknown: 0 }

  constructor(server: SMTPServer, socket: Socket, shared: Shared, entry: Entry) {
    super(server, socket)
    this.#shared = shared
    this.#listener = entry.listener
    this.#share = entry.share
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
    const reader = new Reader()
    reader.oncommand = (line, done) => this.#command(line, done ?? (() => undefined))
    // The reader only fails by a line that does not end.
    reader.on("error", () => this.#say(Smtp.reply(421, "4.5.2", "command line too long")))
    return reader
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
    // A 421 is the end of a session, not an error within it.
    if (code >= 400 && code !== 421 && !this.#isFree(context)) this.#fault()
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
    this.#share.leave()
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
    const tell = (answer: Smtp.Reply): void => {
      this.#say(answer)
      done()
    }
    this.#shared.ask(this.#shared.policy.recipient(wanted.success), (answer) => {
      if (Smtp.isPositive(answer)) {
        this.#transaction = Transaction.accept(this.#transaction, wanted.success)
      }
      if (this.#mayTellAtOnce(answer)) return tell(answer)
      const { commandTimeout, unknownDelay } = this.#shared.service.limits
      this.#deadline = this.#in(Duration.sum(commandTimeout, unknownDelay))
      this.#shared.ask(Effect.delay(Effect.succeed(answer), unknownDelay), tell)
    })
  }

  override handler_DATA(line: Buffer, done: Done): void {
    const envelope = Transaction.data(this.#transaction, line, this.#limits())
    if (Result.isSuccess(envelope))
      this.#whenLast((reader) => this.#receive(reader, envelope.success))
    else this.#say(envelope.failure)
    done()
  }

  override handler_STARTTLS(line: Buffer, done: Done): void {
    // What the library refuses has no handshake behind it.
    if (this.secure || line.toString("latin1").trim().length > "STARTTLS".length) {
      return super.handler_STARTTLS(line, done)
    }
    this.#whenLast(() => super.handler_STARTTLS(line, () => undefined))
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

  #command(line: Buffer, done: Done): void {
    if (isBare(line)) {
      this.#say(Smtp.bareNewline)
      return this._whenWritable(done)
    }
    const { idleCommands } = this.#shared.service.limits
    if (idle.test(line.toString("latin1")) && ++this.#counts.idle > idleCommands) this.#fault()
    if (!this._closing) this._onCommand(line, done)
  }

  /**
   * Goes on if the client has sent nothing behind its command, as it has to wait for our reply (RFC
   * 2920 section 3.1, RFC 3207 section 4). Else somebody else may speak through it.
   */
  #whenLast(then: (reader: Reader) => void): void {
    const reader = this._parser
    if (!(reader instanceof Reader)) return this.#say(Smtp.temporary)
    reader.pause((isEarly) => {
      if (!isEarly) return then(reader)
      this.#say(Smtp.tooEarly)
      this.close()
    })
  }

  #receive(reader: Reader, envelope: Transaction.Envelope): void {
    const { dataTimeout, lineBytes, messageBytes } = this.#shared.service.limits
    const incoming = SmtpData.make({ sizeBytes: messageBytes, lineBytes }, this.#share.budget)
    this.#incoming = incoming
    reader.receive(incoming, () => this.#received(envelope, incoming))
    this.send(354, "end with <CRLF>.<CRLF>")
    this.#deadline = this.#in(dataTimeout)
    this.#progress = { seenBytes: 0, windowBytes: 0, windowMillis: this.#shared.now() }
  }

  #isFree(status: string | false | undefined): boolean {
    return status === Smtp.tooManyRecipients.status && ++this.#counts.excess <= freeExcess
  }

  /** Counts an error; one too many ends the session. */
  #fault(): void {
    if (++this.#counts.errors >= this.#shared.service.limits.errors) this.#say(Smtp.tooManyErrors)
  }

  /** Who guesses names waits, and a machine that guesses them waits for each one. */
  #mayTellAtOnce({ status }: Smtp.Reply): boolean {
    if (status !== Smtp.unknownRecipient.status) return true
    const { unknownRecipients } = this.#shared.service.limits
    return ++this.#counts.unknown <= unknownRecipients || this.#share.isExempt
  }

  #in(duration: Duration.Duration): number {
    return this.#shared.now() + Duration.toMillis(duration)
  }

  #limits(): Transaction.Limits {
    const { messageBytes, recipients } = this.#shared.service.limits
    return { messageBytes, recipients, freeBytes: this.#share.budget.freeBytes() }
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
    if (Smtp.isPositive(answer)) this.#counts.idle = 0
    this._resetSession()
    this.#say(answer)
    if (this.#shared.isStopping()) this.stop()
    else if (this._parser instanceof Reader) this._parser.proceed()
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
      tls: socket instanceof TLSSocket ? tlsOf(socket) : undefined,
      listener: this.#listener
    }
  }
}

/** A socket that was destroyed knows neither any more, whatever its type says. */
export const tlsOf = (socket: TLSSocket): NonNullable<Client["tls"]> => {
  const cipher: Partial<CipherNameAndProtocol> | null = socket.getCipher()
  return { version: socket.getProtocol() ?? "", cipher: cipher?.standardName ?? "" }
}
